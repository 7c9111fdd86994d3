"""PUBLIC. HTTP services for rewards and tools, and the auxiliary models that a run serves.

    http    Service: JSON in, JSON out, with a time limit, retries, a bound on concurrent requests and masked secrets

``model_url`` gives the address of an auxiliary model (``--rm-model``, ``[[engine.engine_models]]``), ``with_secrets``
fills in the environment variables that a URL names. A request without an answer raises
:class:`~slime_core.errors.ServiceError`.
"""

from slime_core.config.model_urls import model_url
from slime_core.services.http import Service, with_secrets

__all__ = ["Service", "model_url", "with_secrets"]
