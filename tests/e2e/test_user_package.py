"""The agent of docs/guides/agents/environments.md, run unchanged with a model of the user's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests import bench
from tests.bench.stacks.cluster import Cluster
from tests.e2e.secrets import leaks

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_llama(folder: Path) -> None:
    special = ["<|im_start|>", "<|im_end|>"]
    characters = sorted(set("0123456789 ?+\nabcdefghijklmnopqrstuvwxyzW_|"))
    vocabulary = {token: number for number, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": special[:1]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            eos_token_id=fast.eos_token_id,
        )
    ).save_pretrained(folder)


def test_the_documented_agent_trains_a_users_own_model_in_a_run_with_a_key(cluster: Cluster) -> None:
    code = re.search(
        r"```python\n(.*?)```",
        (bench.ROOT / "docs/guides/agents/environments.md").read_text(encoding="utf-8"),
        re.S,
    )
    assert code is not None
    (cluster.user_code / "my_agent.py").write_text(code[1], encoding="utf-8")
    make_llama(cluster.folder / "llama")
    config = cluster.config(
        "user-package",
        policy={"model": str(cluster.folder / "llama")},
        environment={part: f"my_agent:{part}" for part in ("tasks", "agent", "reward")},
        engine={"kind": "torch", "context_length": 128},
        train={"iterations": 2},
    )
    key = {"SF_RUN_KEY": "key-of-this-run-alone"}
    cluster.finish(config, cluster.start(config, **key))
    bench.stacks.invariants.check_result(config)
    assert leaks(cluster.folder, key) == []
    assert bench.stacks.invariants.manifests(config)[1, "publish"]["data"]["version"] == 2
    LlamaForCausalLM.from_pretrained(f"{config.run_dir}/policy")


def test_the_readmes_held_out_tasks_are_not_trained_on() -> None:
    code = re.search(r"```python\n(.*?)```", (bench.ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert code is not None
    speller: dict[str, Any] = {}
    exec(compile(code[1], "README.md", "exec"), speller)
    trained, held_out = (
        {speller["tasks"](split, i).prompt for i in range(number)}
        for split, number in (("train", 2000), ("holdout", 128))
    )
    assert len(trained) > 1000 and len(held_out) > 100 and trained.isdisjoint(held_out)


def test_an_agent_that_always_fails_ends_the_run_with_its_own_error(cluster: Cluster) -> None:
    (cluster.user_code / "broken_agent.py").write_text(
        "def agent(task, endpoint):\n    raise RuntimeError('no such tool: hammer')\n", encoding="utf-8"
    )
    config = cluster.config(
        "broken-agent",
        environment={
            "tasks": "tests.bench.stacks.echo_package:tasks",
            "agent": "broken_agent:agent",
            "reward": "tests.bench.stacks.echo_package:reward",
        },
        evaluate={"every": 1000, "num_tasks": 200},
    )
    assert cluster.start(config).wait(bench.waits.patience()) != 0
    assert "every session fails" in cluster.log(config)
    assert "RuntimeError: no such tool: hammer" in cluster.log(config)


def test_a_run_ends_with_the_reason_for_which_nobody_can_run_its_agent(cluster: Cluster) -> None:
    package = "tests.bench.stacks.echo_package"
    config = cluster.config("nobodys-agent", environment={"agent": f"{package}:nobody"})
    assert cluster.start(config).wait(bench.waits.patience()) != 0
    reason = f"ValueError: {package}:nobody: module {package} has no nobody"
    assert reason in cluster.log(config).splitlines()
    assert "no worker is left for `agent`, so the run ends" in cluster.log(config)
