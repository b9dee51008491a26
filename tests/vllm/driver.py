"""One vLLM engine that takes commands: a line of JSON on stdin, a line of JSON on stdout for each.

usage: driver.py JSON     (the arguments of `vllm.LLM`; `kv_transfer_config` as a plain object; `warm_up`: see below)

    {"do": "generate", "prompts": [[token, ...], ...], "max_tokens": n, "transfer": kv_transfer_params or null}
                                                     -> {"outputs": [{"tokens", "cached", "ttft_s", "transfer"}]}
    {"do": "metrics"}                                                   -> {"metrics": {"name{label=value}": number}}
    {"do": "reset", "connector": false}                                 -> {"reset": true}
    {"do": "damage_loads", "count": n}                                  -> {"damaged": true}; the next n loads find
                                                                           that their slots have changed meanwhile
    {"do": "stop"}                                                      -> {"stopped": true}, and the process ends
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def profile(worker: Any) -> None:
    worker.model_runner.profile_run()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not get between the answers

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    arguments = json.loads(sys.argv[1])
    transfer = arguments.pop("kv_transfer_config", None)
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    warm_up = arguments.pop("warm_up", False)
    llm = LLM(**arguments)
    if warm_up:
        # Without compilation vLLM's CPU build leaves out its warm-up, and with it the buffers for what a pipeline stage
        # gets from the one before.
        llm.collective_rpc(profile)

    def generate(prompts: list[list[int]], max_tokens: int, transfer: dict[str, Any] | None = None) -> dict[str, Any]:
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": transfer} if transfer is not None else None,
        )
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        # An engine in a process of its own goes on stepping until the connector is done; here nobody else does.
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            core.step_fn()
        return {
            "outputs": [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                    "ttft_s": output.metrics.first_token_latency,
                    "transfer": output.kv_transfer_params,
                }
                for output in outputs
            ]
        }

    def metrics() -> dict[str, Any]:
        found: dict[str, float] = {}
        for metric in llm.get_metrics():
            labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
            suffix = "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}" if labels else ""
            value = getattr(metric, "value", None)
            if value is not None:
                found[metric.name + suffix] = value
        return {"metrics": found}

    def damage_loads(count: int) -> None:
        from engine_plugin.vllm.worker import KVStoreWorker

        left = [count]

        def still_pinned(*_args: Any) -> bool:
            left[0] -= 1
            return left[0] < 0

        KVStoreWorker._still_pinned = staticmethod(still_pinned)  # type: ignore[method-assign]

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "generate":
                answer(generate(**command))
            case "metrics":
                answer(metrics())
            case "reset":
                answer({"reset": llm.reset_prefix_cache(reset_connector=command["connector"])})
            case "damage_loads":
                damage_loads(**command)
                answer({"damaged": True})
            case "stop":
                answer({"stopped": True})
                break
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
