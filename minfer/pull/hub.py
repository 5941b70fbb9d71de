"""Model files on the Hugging Face Hub.

`huggingface_hub` does the fetching, so its settings apply: login, endpoint, proxy, offline mode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from minfer.errors import Refusal
from minfer.models.gguf import open_gguf
from minfer.pull.staging import require_free

PREFIX = "hf:"
FOLDER = "hf"  # below that of models
FORM = "hf:OWNER/REPO:FILE.gguf"
NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+):(?P<file>[^:@\\\s]+\.gguf)(?:@(?P<revision>\S+))?", re.ASCII
)


@dataclass(frozen=True)
class HubFile:
    """One file of a repository. revision: a branch, tag or commit; None for the newest."""

    repo: str
    file: str
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubFile:
        """From `hf:OWNER/REPO:FILE.gguf[@REVISION]`; refuses other forms."""
        match = NAME.fullmatch(name)
        steps = re.split("[:/]", f"{match['repo']}:{match['file']}") if match else [""]
        if match is None or {"", ".", ".."} & {*steps}:  # these would lead out of its folder
            raise Refusal(
                "0.2",
                f"{name!r} does not read {FORM}, with @REVISION behind it or not",
                {"model": name},
            )
        return cls(**match.groupdict())

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}:{self.file}{'@' + self.revision if self.revision else ''}"

    @property
    def place(self) -> Path:
        """Where it lies below the folder of models; no two names share a place."""
        at = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return Path(FOLDER, self.repo + at, self.file)

    @classmethod
    def all_in(cls, models: Path) -> Iterator[HubFile]:
        """Those that lie below the folder of models."""
        for path in (models / FOLDER).glob("*/*/**/*.gguf"):
            owner, place, *file = path.relative_to(models / FOLDER).parts
            repo, _, revision = place.partition("@")
            found = cls(f"{owner}/{repo}", "/".join(file), unquote(revision) or None)
            if NAME.fullmatch(str(found)) and found.is_good(path):  # else it was not pulled
                yield found

    def is_good(self, path: Path) -> bool:
        """Whether the file is there; it was whole when it took its name."""
        return path.is_file()

    def fetch(self, folder: Path) -> Path:
        """Download the file into `folder`, which is on the disk where it will stay.

        Refuses a disk too small for it and whatever the hub refuses; raises Damaged for a file
        that is no whole GGUF file.
        """
        from huggingface_hub import errors, hf_hub_download

        try:
            found = hf_hub_download(
                self.repo, self.file, revision=self.revision, local_dir=folder, dry_run=True
            )
            require_free(folder, found.file_size or 0, str(self))
            path = Path(
                hf_hub_download(self.repo, self.file, revision=found.commit_hash, local_dir=folder)
            )
        except OSError as error:
            if error.errno is not None:
                raise  # the disk's
            raise self._refusal(error) from None
        except (
            errors.EntryNotFoundError,
            ValueError,  # of a name it does not like, or a size
            RuntimeError,  # of hf_xet
            errors.HTTPError,  # type: ignore[attr-defined]  # of the HTTP library it uses
        ) as error:
            raise self._refusal(error) from None
        open_gguf(path)
        return path

    def _refusal(self, error: Exception) -> Refusal:
        """One line for what the hub's library raised; the first kind that fits."""
        from huggingface_hub import errors

        kinds = {
            errors.GatedRepoError: f"{self.repo} is gated; accept its terms on its page, then log "
            "in (hf auth login)",
            errors.RepositoryNotFoundError: f"the hub has no repository {self.repo}, or it is "
            "private; check the name or log in (hf auth login)",
            errors.RevisionNotFoundError: f"{self.repo} has no revision {self.revision}; look at "
            "its branches, tags and commits",
            errors.LocalEntryNotFoundError: f"the hub cannot be reached for {self} "
            f"({error.__cause__ or error}); check the connection, then pull again",
            errors.EntryNotFoundError: f"{self.repo} has no file {self.file} at revision "
            f"{self.revision or 'main'}; look at the list of its files",
        }
        other = f"{self} could not be fetched ({error}); pull again"
        message = next((text for kind, text in kinds.items() if isinstance(error, kind)), other)
        return Refusal("0.2", message, {"model": str(self)})
