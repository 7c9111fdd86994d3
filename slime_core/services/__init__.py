"""PUBLIC. HTTP services for rewards and tools, and the auxiliary models that a run serves.

    http    Service: JSON in, JSON out, with a time limit, retries, a bound on concurrent requests and masked secrets

``model_url`` gives the address of an auxiliary model (``--rm-model``, ``[[engine.engine_models]]``), ``with_secrets``
fills in the environment variables that a URL names. Engines and routers of the run require its key:
``Service`` sends it, and a request made otherwise adds ``engine_headers(url)``; where it does not, ``refused_key``
recognises the refusal. Before a run, ``url_mistakes`` and
``missing_secrets`` judge a URL that a setting gives, and ``shown`` is what messages show of it. A request without an
answer raises :class:`~slime_core.errors.ServiceError`.
"""

from slime_core.config.engine_key import engine_headers, refused_key
from slime_core.config.secrets import shown
from slime_core.config.serving import model_url
from slime_core.services.http import Service, missing_secrets, url_mistakes, with_secrets

__all__ = [
    "Service",
    "engine_headers",
    "missing_secrets",
    "model_url",
    "refused_key",
    "shown",
    "url_mistakes",
    "with_secrets",
]
