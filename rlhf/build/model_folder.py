"""The policy of a checkpoint as an ordinary model folder, here or on a hub."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.stores import copies
from agents.stores.store import Store
from rlhf import processes
from rlhf.build.train import policy_settings_of
from rlhf.errors import ModelError, whole
from rlhf.recipe import Recipe
from rlhf.training.checkpoints.store import latest
from rlhf.training.contrib.weight_extrapolation import merged
from rlhf.training.hub import Hub
from rlhf.training.policy.model import restore
from rlhf.training.policy.model_files import save_folder


def write_model(checkpoint: Path, out: Path) -> tuple[bool, int | None]:
    """Write the policy of `checkpoint` to the new folder `out`, whole or not at all.

    Returns:
        whether an adapter was merged into its base, and how many entries its store has, None without one.
    """
    is_merged = (checkpoint / "policy" / "adapter_config.json").is_file()
    with whole("the model", out) as partial:
        if is_merged:
            partial.mkdir()
            _merge(checkpoint, partial)
        else:
            shutil.copytree(checkpoint / "policy", partial)
        n_entries = _copy_store(checkpoint, partial)
    return is_merged, n_entries


def refuse_unwritable(hub: Hub) -> None:
    """Make the repository on the hub, or find that it is there. Raises ModelError where nothing could be pushed."""
    try:
        _api().create_repo(hub.repo, private=hub.private, exist_ok=True)
    except Exception as error:  # of the network, the token, the name: each has a class of its own
        raise ModelError(
            "nothing could be pushed to the hub",
            where="push_to_hub",
            got=f"{hub.repo}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}",
            expected="a repository that this machine may write to",
            hint="`hf auth login`, with HF_HUB_OFFLINE unset; or remove the key and push what `rlhf export` writes",
        ) from error


def pushed(recipe: Recipe, run: Path, say: Callable[[str], object]) -> dict[str, str]:
    """Push the policy of a finished run where its recipe says so; its address as `hub`, empty where that failed."""
    hub = recipe.push_to_hub
    if hub is None or not processes.current().is_main:
        return {}
    checkpoint = latest(run / "checkpoints")
    assert checkpoint is not None  # the last step always writes one
    with tempfile.TemporaryDirectory(prefix="rlhf-hub-") as folder:
        model = Path(folder) / "model"
        try:
            write_model(checkpoint, model)
            found = _api().upload_folder(repo_id=hub.repo, folder_path=model, commit_message=f"Train {run.name}")
        except Exception as error:  # the run is whole: whatever a hub says must not end it
            by_hand = f"rlhf export {run} --out model; hf upload {hub.repo} model"
            say(
                f"caution: the policy was not pushed to {hub.repo}: {type(error).__name__}: {error}; by hand: {by_hand}"
            )
            return {"hub": ""}
    say(f"pushed to {found.repo_url}")
    return {"hub": str(found.repo_url)}


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="rlhf-agents")


def _copy_store(folder: Path, into: Path) -> int | None:
    """Copy a checkpoint's memory store; returns its number of entries, None where there is none.

    Raises:
        StoreError: it is damaged.
    """
    if not (folder / copies.FILE).is_file():
        return None
    copies.restore(folder, into / copies.FILE)
    shutil.copyfile(folder / copies.HASH, into / copies.HASH)
    with Store(into / copies.FILE) as store:
        return len(store.entries())


def _merge(folder: Path, into: Path) -> None:
    run = folder.parent.parent
    policy = restore(policy_settings_of(run), folder / "policy", run)
    policy.name_stop_tokens()
    save_folder(merged(policy), into)
    policy.tokenizer.save_pretrained(into)
