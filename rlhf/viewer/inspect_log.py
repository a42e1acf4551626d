"""Attempts as logs of inspect_ai, which `inspect view` and its other tools open: a file for each stored step.

A log is a zip of JSON: `header.json`, `summaries.json`, and a file for each sample. It is written without inspect_ai.
Source: https://inspect.aisi.org.uk/eval-logs.html, version 2 of the log.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf.data import Outcome
from rlhf.evaluation.store import StoredStep
from rlhf.viewer.library import ShownRun
from rlhf.viewer.messages import Conversation, conversations
from rlhf.viewer.redaction import Redaction

_LIMITS = {Outcome.TURN_LIMIT: "message", Outcome.TOKEN_LIMIT: "context", Outcome.TIMEOUT: "time"}


def write_log(run: ShownRun, stored: StoredStep, folder: Path, redaction: Redaction) -> Path:
    """Write the attempts of a step as `STAGE-PHASE-STEP.eval`, a sample at a time; returns its path.

    Raises:
        DataError: the attempts cannot be read.
        OSError: the log cannot be written.
    """
    path = folder / f"{stored.path.stem}.eval"
    eval_spec = _spec(run, stored, redaction)
    summaries: list[dict[str, Any]] = []
    epochs: Counter[str] = Counter()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as log:
        for one in conversations(run, stored, redaction):
            epochs[one.task_id] += 1
            sample = _sample(one, epochs[one.task_id], eval_spec["model"], eval_spec["eval_id"])
            log.writestr(f"samples/{one.task_id}_epoch_{sample['epoch']}.json", _text(sample))
            kept = ("id", "epoch", "input", "target", "metadata", "scores", "model_usage", "total_time", "uuid")
            error = sample["error"] and sample["error"]["message"]
            limit = sample["limit"] and sample["limit"]["type"]
            n_messages = len(sample["messages"])
            summaries.append(
                {**{key: sample[key] for key in kept}, "error": error, "limit": limit, "completed": True}
                | {"message_count": n_messages}
            )
        eval_spec["dataset"] |= {"samples": len(epochs), "sample_ids": list(epochs)}
        eval_spec["config"] = {"epochs": max(epochs.values(), default=1)}
        begun = {"version": 2, "eval": eval_spec, "plan": {"name": "plan", "steps": [], "config": {}}}
        log.writestr("_journal/start.json", _text(begun))
        log.writestr("summaries.json", _text(summaries))
        log.writestr("header.json", _text({**begun, **_results(summaries, eval_spec["created"])}))
    return path


def _spec(run: ShownRun, stored: StoredStep, redaction: Redaction) -> dict[str, Any]:
    data, summary = run.poll(), run.summary
    told = {
        "task": str(summary.get("suite") or data.setting("environment.kind") or run.id),
        "model": str(summary.get("policy") or data.setting("policy.path") or data.setting("policy.kind") or "policy"),
        "metadata": {"run": run.id, "stage": stored.stage, "phase": stored.phase, "step": stored.step},
    }
    plain: dict[str, Any] = redaction.values(told)
    key = hashlib.sha256(str(stored.path.resolve()).encode()).hexdigest()[:22]
    made = datetime.fromtimestamp(int(stored.path.stat().st_mtime), UTC).isoformat()
    ids = {"eval_id": key, "run_id": key, "task_id": key}
    return {**ids, **plain, "created": made, "task_version": 0, "dataset": {"name": plain["task"]}, "config": {}}


def _sample(one: Conversation, epoch: int, model: str, eval_id: str) -> dict[str, Any]:
    last = next((m["content"] for m in reversed(one.messages) if m["role"] == "assistant"), "")
    answer = {"role": "assistant", "content": last, "source": "generate", "model": model}
    usage = {key: one.facts.get(of, 0) for key, of in (("input_tokens", "n_read"), ("output_tokens", "n_tokens"))}
    usage["total_tokens"] = sum(usage.values())
    seconds = one.facts.get("seconds")
    is_failure = one.outcome.is_infrastructure_error
    limit = None if is_failure else _LIMITS.get(one.outcome)
    key = hashlib.sha256(f"{eval_id} {one.task_id} {epoch}".encode()).hexdigest()[:22]
    return {
        "id": one.task_id,
        "epoch": epoch,
        "uuid": key,
        "input": one.messages[0]["content"] if one.messages else "",
        "target": "",
        "messages": [{**message, "id": f"{key}{i}"} for i, message in enumerate(one.messages)],
        "output": {"model": model, "choices": [{"message": answer, "stop_reason": "stop"}], "usage": usage},
        "scores": None if is_failure else _scores(one),
        "metadata": {"attempt": one.attempt, "outcome": str(one.outcome), "detail": one.detail, **one.facts},
        "model_usage": {model: usage} if one.messages else {},
        "total_time": seconds,
        "error": {"message": one.detail, "traceback": "", "traceback_ansi": ""} if is_failure else None,
        "limit": limit and {"type": limit, "limit": _used_of_limit(one, limit)},
    }


def _used_of_limit(one: Conversation, limit: str) -> float:
    """How much of its limit an attempt took: messages, tokens of its longest context, or seconds."""
    return float({"message": len(one.messages), "context": one.facts["n_context"], "time": one.facts["seconds"]}[limit])


def _scores(one: Conversation) -> dict[str, Any]:
    scores = {"success": {"value": "C" if one.outcome is Outcome.SOLVED else "I", "explanation": one.detail}}
    if one.facts["score"] is not None:
        scores["score"] = {"value": one.facts["score"], "explanation": "weighted sum of the rewards"}
    for name, part in one.parts.items():
        scores[name if name not in scores else f"reward {name}"] = {"value": part["value"], "explanation": part["why"]}
    return scores


def _results(summaries: list[dict[str, Any]], created: str) -> dict[str, Any]:
    scored = [one["scores"] for one in summaries if one["scores"]]
    n_solved = sum(scores["success"]["value"] == "C" for scores in scored)
    success = _metrics("success", {"accuracy": n_solved / max(len(scored), 1)}, len(scored))
    names = dict.fromkeys(name for scores in scored for name in scores if name != "success")
    means = (_mean(name, [s[name]["value"] for s in scored if name in s]) for name in names)
    return {
        "status": "success",
        "results": {
            "total_samples": len(summaries),
            "completed_samples": len(summaries),
            "scores": [success, *means] if scored else [],
        },
        "stats": {"started_at": created, "completed_at": created, "model_usage": {}},
    }


def _mean(name: str, values: list[float]) -> dict[str, Any]:
    return _metrics(name, {"mean": sum(values) / len(values)}, len(values))


def _metrics(name: str, values: dict[str, float], n: int) -> dict[str, Any]:
    metrics = {metric: {"name": metric, "value": value} for metric, value in values.items()}
    return {"name": name, "scorer": name, "scored_samples": n, "metrics": metrics}


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, default=str)
