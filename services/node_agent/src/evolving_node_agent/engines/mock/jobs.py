"""What a job asks: whether it is possible here, what it draws, and when its output ends."""

from __future__ import annotations

from evolving_node_agent.engines.mock.config import MockConfig
from evolving_node_agent.engines.mock.context import ContextKv
from evolving_node_agent.engines.mock.model import finish_reason, next_token
from evolving_node_agent.engines.port import DecodeJob, FinishReason, PrefillJob, Rejected

Job = PrefillJob | DecodeJob


def check_job(job: Job, config: MockConfig) -> None:
    """Raise Rejected for a job that this engine can never do."""
    prompt = len(job.tokens) - job.generated
    if len(job.root) != 32:
        raise Rejected(f"the root is {len(job.root)} bytes, not 32")
    if job.generated < 0 or prompt < 1:
        raise Rejected("the prompt is empty")
    if prompt > config.max_prompt_tokens or len(job.tokens) >= config.max_context_tokens:
        raise Rejected(f"{prompt} prompt tokens exceed {config.max_prompt_tokens}, or leave no room for output")
    if int(job.tokens.max()) >= config.vocab_size:
        raise Rejected(f"token {int(job.tokens.max())} is not in the vocabulary of {config.vocab_size}")
    if job.generated >= job.sampling.max_tokens:
        raise Rejected("nothing is left to generate")


def generated_tokens(job: Job) -> list[int]:
    """Output of earlier attempts."""
    ids: list[int] = job.tokens[len(job.tokens) - job.generated :].tolist()
    return ids


def draw(kv: ContextKv, job: Job, output: list[int], config: MockConfig) -> int:
    """The next token after the context in `kv`; `output` is what was drawn so far."""
    prompt = job.tokens[: len(job.tokens) - job.generated]
    return next_token(kv.logits_seed(), job.sampling, prompt, output, config.vocab_size)


def finish(token: int, output: list[int], job: Job, config: MockConfig) -> FinishReason | None:
    """Whether the output, which now ends with `token`, is complete."""
    context_tokens = len(job.tokens) - job.generated + len(output)
    return finish_reason(
        token, len(output), context_tokens, job.sampling, config.eos_token_id, config.max_context_tokens
    )
