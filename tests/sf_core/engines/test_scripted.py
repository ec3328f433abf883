from sf_core.engines.scripted import ScriptedEngine, scripted_logprob
from sf_core.testing.engines import EngineTests, awake, drain, ids_of
from sf_core.types import FinishReason, GenerationRequest, Sampling, WeightsRef
from tests.bench.engines.self_running import SelfRunningEngine


def script(prompt_ids: list[int], seed: int) -> list[int]:
    return [prompt_ids[0] + seed + i for i in range(40)]


class TestContract(EngineTests):
    def make(self) -> ScriptedEngine:
        return ScriptedEngine(script)


class TestContractOfTheAsyncDriver(EngineTests):
    def make(self) -> SelfRunningEngine:
        return SelfRunningEngine(ScriptedEngine(script))


def serving(**options: int) -> ScriptedEngine:
    engine = ScriptedEngine(script, **options)
    awake(engine, WeightsRef(0, ""))
    return engine


def request(
    prompt: list[int],
    name: str = "r",
    position: int = 0,
    max_tokens: int = 100,
    stop: tuple[int, ...] = (),
    seed: int = 0,
    stream: bool = False,
) -> GenerationRequest:
    return GenerationRequest(name, prompt, position, max_tokens, stop, Sampling(seed=seed), stream)


def test_the_script_decides_the_tokens_and_its_end_stops_the_turn() -> None:
    engine = serving()
    engine.submit(request([5], seed=2))
    chunks = drain(engine)
    assert ids_of(chunks) == script([5], 2)
    assert [len(chunk.token_ids) for chunk in chunks] == [16, 16, 8]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason.STOP]


def test_stop_token_and_budget_end_a_turn() -> None:
    engine = serving(tokens_per_step=7)
    engine.submit(request([0], "stop", stop=(9,)))
    engine.submit(request([0], "budget", max_tokens=10))
    ended = {chunk.request_id: chunk for chunk in drain(engine)}
    assert ended["stop"].token_ids == list(range(10))
    assert ended["stop"].finish_reason is FinishReason.STOP
    assert ended["budget"].token_ids == list(range(10))
    assert ended["budget"].finish_reason is FinishReason.LENGTH


def test_an_aborted_turn_continues_elsewhere_where_it_stopped() -> None:
    engine = serving()
    engine.submit(request([1, 2]))
    for _ in range(5):
        engine.step()
    (chunk,) = engine.abort()
    assert chunk.finish_reason is FinishReason.ABORT
    assert engine.num_requests == 0
    other = serving(tokens_per_step=3)
    other.submit(request([1, 2, *chunk.token_ids], position=len(chunk.token_ids)))
    assert chunk.token_ids + ids_of(drain(other)) == script([1, 2], 0)


def test_logprobs_are_a_function_of_token_position_and_version() -> None:
    engine = serving()
    awake(engine, WeightsRef(3, ""))
    engine.submit(request([1], position=0))
    chunks = []
    for version in (4, 5, 6):
        chunks += engine.step() + engine.step()
        chunks += awake(engine, WeightsRef(version, ""))
    chunks += drain(engine)
    position = 0
    for chunk in chunks:
        for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            assert logprob == scripted_logprob(token, position, chunk.version)
            position += 1
    assert [(chunk.version, len(chunk.token_ids)) for chunk in chunks[:3]] == [(3, 2), (4, 2), (5, 2)]
    assert position == 40


def test_requests_beyond_max_running_wait() -> None:
    engine = serving(max_running=1)
    engine.submit(request([1], "first", stream=True))
    engine.submit(request([1], "second", stream=True))
    assert {chunk.request_id for chunk in engine.step()} == {"first"}
    engine.abort(["first", "unknown"])
    assert {chunk.request_id for chunk in engine.step()} == {"second"}
