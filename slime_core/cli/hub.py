"""Downloads models and prompts that settings name as the Hugging Face hub does.

    --hf-checkpoint Qwen/Qwen3-0.6B             a repository, if there is no such folder here
    --hf-checkpoint Qwen/Qwen3-0.6B@c1899de     a revision of it
    --prompt-data hub:openai/gsm8k/main:train   the files of a split, here in the folder main

The files are in the cache of huggingface_hub, which reads ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE``. A setting becomes the path in the cache. This path names the commit, so a resumed run reads the same
files; if the cache has lost them, they are downloaded again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeGuard

from slime_core.config.settings import Setting, core_settings
from slime_core.config.sources import read_command_line, read_document
from slime_core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

__all__ = ["Downloads"]

RepoType = Literal["model", "dataset"]

REPOSITORIES: Mapping[str, RepoType] = {
    **dict.fromkeys(("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load"), "model"),
    **dict.fromkeys(("prompt_data", "eval_prompt_data"), "dataset"),
}
"""Settings that may name a repository."""

DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
WEIGHTS = ("*.safetensors",)
OTHER_WEIGHTS = ("original/*", "consolidated*")
"""Weights in a repository that repeat those of its Hugging Face folder."""

PROMPT_SUFFIXES = (".parquet", ".jsonl", ".ndjson")

_MODEL = re.compile(r"(?:hub:)?([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
_PROMPTS = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@(\w[\w.-]*))?((?:/[\w.-]+)*)(?::([\w.-]+))?(@\[[^]]*\])?")
_CACHED = re.compile(r".*/(?:model|dataset)s--([\w.-]+?--[\w.-]+)/snapshots/([0-9a-f]{40})(?:/(.+?))?(@\[[^]]*\])?")


class Downloads:
    """Replaces names on the hub by paths in the cache; weights come last, when the settings are known to be right.

    Arguments:
        argv: a command line; the file that it names counts too.

    Attributes:
        argv: the command line with paths. Prompts and the descriptions of models are downloaded.

    Raises:
        ConfigError: a repository, revision or split does not exist, or cannot be downloaded.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._models: list[tuple[str, str, str, str]] = []  # flag, name, repository, commit
        settings = {key: core_settings()[key] for key in REPOSITORIES}
        replaced = {}
        for key, (base, names) in _words(argv, settings).items():
            flag = settings[key].flag
            paths = [self._local(name, REPOSITORIES[key], base=base, flag=flag) for name in names]
            if paths != names:
                replaced[flag] = paths
        self.argv = _without(argv, replaced.keys())
        self.argv += [word for flag, paths in replaced.items() for word in (flag, *paths)]

    def finish(self) -> None:
        """Download the weights of the models.

        Raises:
            ConfigError: they cannot be downloaded.
        """
        for flag, name, repository, commit in self._models:
            with _explained(flag, name):
                _download(repository, "model", commit, (*DESCRIPTION, *WEIGHTS))

    def _local(self, name: str, kind: RepoType, *, base: Path, flag: str) -> str:
        """Return the path of what ``name`` names; ``name`` itself if it is no name on the hub."""
        match = _MODEL.fullmatch(name)
        if _CACHED.fullmatch(name):
            return self._cached(name, kind, flag=flag)
        if kind == "model" and match is not None and not (base / os.path.expanduser(name)).exists():
            return self._model(name, *match.groups(), flag=flag)
        if kind == "dataset" and (prompts := _PROMPTS.fullmatch(name)):
            with _explained(flag, name):
                return _split(name, *prompts.groups(), flag=flag)
        return name

    def _model(self, name: str, repository: str, revision: str | None, *, flag: str) -> str:
        with _explained(flag, name):
            folder = _download(repository, "model", revision, DESCRIPTION)
        self._models.append((flag, name, repository, folder.name))
        return str(folder)

    def _cached(self, path: str, kind: RepoType, *, flag: str) -> str:
        """Return the path of files in the cache of this machine, for one that a recorded run used."""
        match = _CACHED.fullmatch(path)
        assert match is not None
        repository, commit, file, rows = match.groups()
        if next(Path(path.partition("/snapshots/")[0]).glob(f"snapshots/{commit}/{file or '*'}"), None):
            return path
        repository = repository.replace("--", "/")
        if kind == "model":
            return self._model(path, repository, commit, flag=flag)
        with _explained(flag, path):
            return str(_download(repository, kind, commit, [file or "*"]) / (file or "")) + (rows or "")


def _words(argv: Sequence[str], settings: Mapping[str, Setting]) -> dict[str, tuple[Path, list[str]]]:
    """Return the words of each setting that is given, and the folder to which its paths are relative."""
    words = {}
    line = read_command_line(argv, core_settings())
    document = read_document(Path(line.config[0])) if len(line.config) == 1 and Path(line.config[0]).is_file() else None
    for key, setting in settings.items():
        if key in line.words:
            words[key] = (Path(), line.words[key])
        elif document is not None and isinstance(table := document.tables.get(setting.section), dict):
            base, value = document.path.parent, table.get(setting.name)
            if isinstance(value, str):
                words[key] = (base, [value])
            elif _has_repositories(value):
                # Paths of the same list move from the file to the flag, where they are relative to another folder.
                words[key] = (base, [word for name, path in value for word in (name, _in_file(path, base))])
    return words


def _has_repositories(value: object) -> TypeGuard[list[list[str]]]:
    """Return whether a value of a file is a list of names with paths, of which at least one is on the hub."""
    pairs = value if isinstance(value, list) else []
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], str) for pair in pairs):
        return False
    return any(_PROMPTS.fullmatch(path) or _CACHED.fullmatch(path) for _, path in pairs)


def _in_file(path: str, base: Path) -> str:
    return path if path.startswith("hub:") else os.path.join(base, os.path.expanduser(path))


def _without(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return ``argv`` without ``flags`` and their words."""
    kept, drops = [], False
    for word in argv:
        if word.startswith("--"):
            drops = word.partition("=")[0] in flags
        if not drops:
            kept.append(word)
    return kept


def _download(repository: str, kind: RepoType, revision: str | None, files: Sequence[str]) -> Path:
    """Download ``files``, which may be patterns, and return the folder of the commit in the cache."""
    from huggingface_hub import snapshot_download

    ignored = OTHER_WEIGHTS if kind == "model" else None
    return Path(
        snapshot_download(
            repository,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=None if ignored is None else list(ignored),
        )
    )


def _split(
    name: str, repository: str, revision: str | None, folder: str, split: str | None, rows: str | None, *, flag: str
) -> str:
    """Download the files of a split, and return their path, or a pattern that they alone match."""
    files = [file for file in _files(repository, revision) if PurePosixPath(file).suffix in PROMPT_SUFFIXES]
    inside = [file for file in files if f"/{file}".startswith(f"{folder}/")]
    starts = re.compile(rf"{re.escape(split)}(?![A-Za-z0-9])" if split else "")
    chosen = [file for file in inside if starts.match(PurePosixPath(file).name)]
    homes = {(str(PurePosixPath(file).parent), PurePosixPath(file).suffix) for file in chosen}
    if len(homes) != 1:
        listed = ", ".join(sorted(files)[:20]) or f"no file that ends in {', '.join(PROMPT_SUFFIXES)}"
        found = "no files of it" if not chosen else f"its files are in {len(homes)} folders or formats"
        raise ConfigError(f"{flag} {name}: {found}; write hub:OWNER/NAME/FOLDER:SPLIT. The repository has {listed}")
    ((home, suffix),) = homes
    place = PurePosixPath(home) / (PurePosixPath(chosen[0]).name if len(chosen) == 1 else f"{split or ''}*{suffix}")
    if not all(fnmatch(file, str(place)) == (file in chosen) for file in inside):
        raise ConfigError(f"{flag} {name}: other files match {place} too; name one file")
    return str(_download(repository, "dataset", revision, chosen) / place) + (rows or "")


def _files(repository: str, revision: str | None) -> list[str]:
    """Return the files of a data set on the hub; offline, those in the cache."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        return HfApi().list_repo_files(repository, repo_type="dataset", revision=revision)
    commits = [commit for cached in _cached() if cached.repo_id == repository for commit in cached.revisions]
    chosen = [
        commit
        for commit in commits
        if (revision or "main") in commit.refs or (revision and commit.commit_hash.startswith(revision))
    ]
    return [
        str(path.relative_to(commit.snapshot_path)) for commit in chosen for path in commit.snapshot_path.rglob("*")
    ]


@contextmanager
def _explained(flag: str, name: str) -> Iterator[None]:
    """Raise ConfigError in place of the errors of huggingface_hub."""
    from httpx import HTTPError
    from huggingface_hub import errors

    said = f"{flag} {name}"
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{said}: the repository is gated. Accept its conditions on the hub, then run `hf auth login` or set "
            "HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{said}: the repository has no such revision") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{said}: neither a path here nor a repository on the hub{nearest(_bare(name), _cached_repositories())}. "
            "A private one needs HF_TOKEN"
        ) from None
    except (HTTPError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        cause = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{said}: neither a path here nor in the cache, and the hub cannot be reached: {cause}. In the cache: "
            f"{', '.join(_cached_repositories()) or 'nothing'}"
        ) from None


def _bare(name: str) -> str:
    return name.removeprefix("hub:").partition("@")[0].partition(":")[0]


def _cached_repositories() -> list[str]:
    return sorted(repository.repo_id for repository in _cached())


def _cached() -> Iterable[CachedRepoInfo]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return ()
