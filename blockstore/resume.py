"""Generations of mlx_lm.server that go on after a kill: which requests can, and where checkpoints hook in.

checkpoints = Checkpoints(store, every=64)
mlx_lm.server.ResponseGenerator = response_generator(checkpoints, identity)

While a request is served that can be resumed, mlx_lm.generate.generate_step is replaced on that thread. What stands
above it sees the tokens of before as if they came now: text, stop words and counts need nothing of ours.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final

from kvcodecs.backend import mx

from .checkpoints import Checkpoints, Generation, Request, Restored, set_random_key
from .identity import Identity
from .jsontext import MAX_INTEGER
from .versions import versions_of

# The prompt's tokens say what the template's arguments did, the identity which model it is; log-probabilities and the
# settings of a draft model decide no token of a request that can be resumed.
_WITHOUT_INFLUENCE: Final = ("model", "chat_template_kwargs", "num_draft_tokens", "logprobs", "top_logprobs")
_SETTINGS: Final = ("kv_bits", "kv_group_size", "quantized_kv_start")
_PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# A token, and the log-probabilities that it was drawn from.
_Steps = Generator[tuple[int, Any], None, None]


def response_generator(checkpoints: Checkpoints, identity: Callable[[Any], Identity]) -> type[Any]:
    """A subclass of mlx_lm.server.ResponseGenerator, made in the same way, whose generations can be resumed.

    identity: what a model key of the server's means; asked once for each, on the generation thread.
    """
    base: Any = importlib.import_module("mlx_lm.server").ResponseGenerator
    known = functools.cache(identity)

    def serve_single(self: Any, request: Any, *further: Any) -> None:
        answers, asked, args = request
        provider = self.model_provider
        if self._is_distributed or provider.draft_model is not None or not is_resumable(args):
            base._serve_single(self, request, *further)
            return
        serving = _Serving(checkpoints, functools.partial(_request_of, provider, args, known), self.prompt_cache)
        self.prompt_cache = serving  # which asks it for the prompt's caches, and gives it back the answer's
        try:
            with _HOOK.on_this_thread(serving):
                base._serve_single(self, (_Answers(answers, serving), asked, args), *further)
        finally:
            self.prompt_cache = serving.prompt_cache
            serving.end()

    return type(base.__name__, (base,), {"_serve_single": serve_single, "__doc__": base.__doc__})


def is_resumable(args: Any) -> bool:
    """Whether the same arguments always give the same tokens, and tokens alone; args are mlx_lm.server's.

    Penalties look back at tokens that a resumed generation does not feed; log-probabilities are not kept.
    """
    is_fixed = args.sampling.temperature == 0 if args.seed is None else abs(args.seed) <= MAX_INTEGER
    is_penalized = any(getattr(args.logits, name) for name in _PENALTIES)
    return bool(is_fixed and not is_penalized and not args.logprobs and args.top_logprobs <= 0)


def request_key(args: Any, settings: Any, eos_token_ids: Sequence[int], prompt: Sequence[int]) -> str:
    """A digest of all that decides a request's tokens beside the model: prompt, arguments, settings, versions."""
    arguments = dataclasses.asdict(args)
    described = {
        "format": 1,
        "prompt": list(prompt),
        "arguments": {name: value for name, value in arguments.items() if name not in _WITHOUT_INFLUENCE},
        "settings": {name: getattr(settings, name, None) for name in _SETTINGS},
        "eos": sorted(eos_token_ids),
        "versions": versions_of(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _request_of(provider: Any, args: Any, identity: Callable[[Any], Identity], prompt: Sequence[int]) -> Request:
    key = request_key(args, provider.cli_args, provider.tokenizer.eos_token_ids, prompt)
    return Request(identity(provider.model_key), key, tuple(prompt), args.seed, provider.model)


class _Serving:
    """One request while mlx-lm serves it. Stands before the server's prompt cache meanwhile."""

    def __init__(
        self, checkpoints: Checkpoints, described: Callable[[Sequence[int]], Request], prompt_cache: Any
    ) -> None:
        self.prompt_cache: Final = prompt_cache
        self.is_done = False  # answered to its end, or failed
        self._checkpoints = checkpoints
        self._described = described
        self._generation: Generation | None = None
        self._restored: Restored | None = None
        # Whether the caches hold just the tokens that were given out.
        self._is_in_step = True

    def end(self) -> None:
        """Nobody asks again for what is done. A client that left may: its checkpoint stays."""
        if self._generation is not None and self.is_done:
            self._generation.end()

    # ---- as the server's prompt cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.prompt_cache, name)

    def __len__(self) -> int:
        return len(self.prompt_cache)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """The caches of a checkpoint of this request, and the prompt's last token; else what the prompt cache has."""
        if min(tokens, default=-1) >= 0:  # an image has an id below zero
            self._look(tokens)
        if self._restored is not None:
            return self._restored.caches, tokens[-1:]
        found: tuple[list[Any] | None, list[int]] = self.prompt_cache.fetch_nearest_cache(model, tokens)
        return found

    def insert_cache(self, *args: Any, **kwargs: Any) -> None:
        if self._is_in_step:
            self.prompt_cache.insert_cache(*args, **kwargs)

    def _look(self, tokens: Sequence[int]) -> None:
        try:
            self._generation = self._checkpoints.begin(self._described(tokens))
            self._restored = self._generation.restore()
        except Exception as error:
            self._checkpoints.failures.say("a generation goes without checkpoints", error)

    # ---- as generate_step

    def steps(self, generate_step: Any, prompt: Any, model: Any, *args: Any, **kwargs: Any) -> _Steps:
        """What mlx-lm's own generate_step gives; where there was a checkpoint, behind what it gave before that."""

        def original(prompt: Any, **changed: Any) -> _Steps:
            steps: _Steps = generate_step(prompt, model, *args, **{**kwargs, **changed})
            return steps

        generation, caches = self._generation, kwargs.get("prompt_cache")
        if generation is None or caches is None:
            return original(prompt)
        if self._restored is None:
            return self._watched(generation, original(prompt), [], caches)
        try:
            steps = _gone_on(original, self._restored, generation.request.seed)
        except Exception as error:
            self._checkpoints.failures.say("a checkpoint could not be used", error)
            generation.end()
            return self._watched(generation, _begun_anew(original, generation.request, caches), [], caches)
        return self._resumed(generation, steps, self._restored.generated, caches)

    def _watched(self, generation: Generation, steps: _Steps, generated: list[int], caches: Any) -> _Steps:
        with contextlib.closing(steps):
            for token, logprobs in steps:
                generated.append(token)
                self._is_in_step = True
                yield token, logprobs
                generation.advance(generated, caches)

    def _resumed(self, generation: Generation, steps: _Steps, generated: list[int], caches: Any) -> _Steps:
        """The caches are ahead of what is given out until the first of `steps` is: who leaves before leaves none."""
        self._is_in_step = False
        self._checkpoints.count_resumed(len(generated))
        no_logprobs = mx.zeros(max(generated) + 1)
        for token in generated:
            yield token, no_logprobs
        yield from self._watched(generation, steps, [*generated], caches)


def _gone_on(original: Callable[..., _Steps], restored: Restored, seed: int | None) -> _Steps:
    """The steps behind a checkpoint. The first is made now, so that a failure shows before anything is given out.

    max_tokens may stay what it was: stream_generate counts by itself.
    """
    if seed is not None:
        set_random_key(restored.random_key)
    steps = original(mx.array(restored.generated[-1:]), prompt_progress_callback=None)
    first = next(steps)

    def all_of_them() -> _Steps:
        yield first
        yield from steps

    return all_of_them()


def _begun_anew(original: Callable[..., _Steps], request: Request, caches: list[Any]) -> _Steps:
    """The steps from the prompt on, in new caches, which take the place of `caches` in the same list."""
    from mlx_lm.models.cache import make_prompt_cache

    caches[:] = make_prompt_cache(request.model)
    if request.seed is not None:
        mx.random.seed(request.seed)
    return original(mx.array(request.prompt))


class _Answers:
    """Stands before the queue to the client, to see whether the request comes to its end."""

    def __init__(self, queue: Any, serving: _Serving) -> None:
        self._queue = queue
        self._serving = serving

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put(self, item: Any) -> None:
        if isinstance(item, Exception) or getattr(item, "finish_reason", None) is not None:
            self._serving.is_done = True
        self._queue.put(item)


class _Hook:
    """mlx_lm.generate.generate_step, replaced while it is wanted; threads that want nothing get what was there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._original: Any = None
        self._here = threading.local()

    @contextlib.contextmanager
    def on_this_thread(self, serving: _Serving) -> Iterator[None]:
        module: Any = importlib.import_module("mlx_lm.generate")  # the package has a function of that name
        with self._lock:
            self._wanted += 1
            if self._original is None:
                self._original, module.generate_step = module.generate_step, self._generate_step
        self._here.serving = serving
        try:
            yield
        finally:
            self._here.serving = None
            with self._lock:
                self._wanted -= 1
                # Somebody else may have put something over it meanwhile, which calls this one.
                if not self._wanted and module.generate_step == self._generate_step:
                    module.generate_step, self._original = self._original, None

    def _generate_step(self, *args: Any, **kwargs: Any) -> Any:
        serving: _Serving | None = getattr(self._here, "serving", None)
        original = self._original
        return original(*args, **kwargs) if serving is None else serving.steps(original, *args, **kwargs)


_HOOK: Final = _Hook()
