"""The engine on a GPU, emulated or real, gives what it gives on the CPU."""

import numpy as np

from twell_numba.infer.engine import Engine
from twell_numba.infer.generate import generate
from twell_numba.infer.request import GenerationSettings
from twell_numba.models.config import ModelConfig
from twell_numba.models.tokenizer import ByteTokenizer
from twell_numba.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=131, d_model=8, d_ffn=6, n_layers=1, n_heads=2, n_kv_heads=1, context_length=12
)
PROMPTS = [[97, 98, 99], [100], [97, 98, 99, 100, 101]]


def make_model(dtype):
    model = Transformer(CONFIG, np.random.default_rng(3), dtype)
    for parameter in model.parameters().values():
        if parameter.value.ndim == 2:
            parameter.value *= 10  # so that its choices are clear
    return model


def test_requests_side_by_side(machine):
    """A prompt over three chunks, settings of their own, and pages that are used again."""
    all_settings = [
        GenerationSettings(max_new_tokens=3, temperature=0.0, logprobs=1),
        GenerationSettings(max_new_tokens=3, repetition_penalty=1.3, seed=1),
        GenerationSettings(max_new_tokens=2, top_k=5, seed=2),
    ]
    results = []
    for dtype, stream in ((np.float64, None), (np.float32, machine.gpu.stream)):
        model = make_model(dtype)
        if stream is not None:
            model.move_to_gpu(stream, np.float32)
        engine = Engine(model, ByteTokenizer(), prefill_chunk=2, cache_tokens=32)
        requests = [
            engine.submit(prompt, settings)
            for prompt, settings in zip(PROMPTS, all_settings, strict=True)
        ]
        engine.run()
        assert engine.cache_tokens_used == 0
        results.append(requests)
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert on_gpu.tokens == on_cpu.tokens
        assert on_gpu.finish_reason == "length"
    pairs = zip(results[0][0].token_logprobs, results[1][0].token_logprobs, strict=True)
    for expected, actual in pairs:
        np.testing.assert_allclose(actual.logprob, expected.logprob, atol=1e-4)


def test_generation_with_every_setting(machine):
    texts = []
    for dtype, stream in ((np.float64, None), (np.float32, machine.gpu.stream)):
        model = make_model(dtype)
        if stream is not None:
            model.move_to_gpu(stream, np.float32)
        for settings in ({"min_p": 0.1}, {"repetition_penalty": 1.5, "logprobs": 0}):
            generation = generate(
                model, ByteTokenizer(), "abc", max_new_tokens=3, temperature=2.0, **settings
            )
            texts.append("".join(generation))
    assert texts[:2] == texts[2:]
