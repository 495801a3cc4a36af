"""vLLM's backend of prefills (`mla_prefill_backend` of its attention_config) over MlaPrefill: 0.26 to 0.33 by one code
path. New tokens see each other causally. What the cache holds of their requests is decompressed with them in passes
of as many requests as there is room for; where one has none alone it comes in chunks, which all of them see, and vLLM
merges the parts by their log-sum-exps.
"""

import copy
import functools
import itertools
from typing import ClassVar

import torch
import vllm._custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from hypermla._planned import HOPPER
from hypermla.mla_decode import LATENT, ROPE
from hypermla.mla_prefill import NOPE, VALUE, MlaPrefill

logger = init_logger("vllm.hypermla")


class Pass:
    """Of a step, neighbouring requests with all of their tokens, contexts included, which the cache holds when a layer
    attends: one gather, one projection and one attention are enough for them, where chunks of contexts have one of each
    beside those of the new tokens, and a merge."""

    def __init__(self, requests, query_starts, token_starts, workspace):
        """requests: a slice of a step's prefills, whose queries and tokens all start where those lists say; the
        workspace has rows for the tokens of these."""
        device, own = workspace.device, slice(requests.start, requests.stop + 1)
        query_starts, token_starts = query_starts[own], token_starts[own]
        from_zero = [[at - starts[0] for at in starts] for starts in (query_starts, token_starts)]
        starts = torch.tensor(from_zero, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.requests, self.queries = requests, slice(query_starts[0], query_starts[-1])
        self.query_starts, self.token_starts = starts.to(device, non_blocking=True).unbind()
        self._tokens, self._rows = from_zero[1][-1], workspace

    @functools.cached_property
    def _request_of(self):
        """Of each token, for all layers."""
        return _requests_of(self.token_starts, self._tokens)

    @functools.cached_property
    def _begins(self):
        return torch.zeros_like(self.token_starts[1:])

    @functools.cached_property
    def _row_of(self):
        """Of each new token, behind its request's context."""
        count = self.queries.stop - self.queries.start
        behind = (self.token_starts - self.query_starts)[1:]
        return torch.arange(count, device=behind.device) + behind[_requests_of(self.query_starts, count)]

    def gather(self, block_table, cache, kind, scale):
        """[tokens, 576] of a layer's cache, of that kind."""
        ops.gather_and_maybe_dequant_cache(
            src_cache=cache, dst=self._rows, block_table=block_table[self.requests], cu_seq_lens=self.token_starts,
            token_to_seq=self._request_of, num_tokens=self._tokens, kv_cache_dtype=kind, scale=scale,
            seq_starts=self._begins)
        return self._rows[:self._tokens]

    def put_new(self, latents, rope):
        """In place of what gather() found of them: the step's new tokens [tokens, 512] and [tokens, 1, 64], where the
        cache has rounded ones."""
        self._rows[:, :LATENT].index_copy_(0, self._row_of, latents[self.queries])
        self._rows[:, LATENT:].index_copy_(0, self._row_of, rope[self.queries, 0])


def _requests_of(starts, count):
    """The request of each of `count` tokens, which start there."""
    at = torch.arange(count, dtype=torch.int32, device=starts.device)
    return torch.searchsorted(starts[1:], at, right=True, out_int32=True)


def _runs(tokens, most):
    """Slices of neighbours, each of at most `most` tokens, if a single one has no more, and as long as may be."""
    begins, held = [0], 0
    for i, own in enumerate(tokens):
        if held and held + own > most:
            begins.append(i)
            held = 0
        held += own
    return [slice(*ends) for ends in zip(begins, [*begins[1:], len(tokens)])]


def _passes(tokens, room):
    """Slices of requests, as few as have room for their tokens, and alike where that takes no more of them; none where
    one alone has no room. They may be more than vLLM's attentions to new tokens and to chunks would be, but two
    neighbours have more tokens than there is room for at once, and no results to merge."""
    total, longest = sum(tokens), max(tokens)
    if longest > room:
        return []
    fewest = _runs(tokens, room)
    alike = _runs(tokens, min(max(longest, -(-total // len(fewest)) + longest // 2), room))
    return alike if len(alike) == len(fewest) else fewest


class HyperMLAPrefill(MLAPrefillBackend):
    """passes: of the step that is built; none: its layers hand over new tokens and chunks of contexts. Only
    HyperMLAImpl.forward_mha() knows of them, so only a builder all of whose layers attend by it calls take_contexts():
    beside another backend of decoding vLLM's own attend, and Kimi-K3's layers do so by themselves."""

    passes = ()
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE)]

    def __init__(self, *dimensions, **named):
        super().__init__(*dimensions, **named)
        found = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        if found != (NOPE, ROPE, VALUE):  # vLLM has asked for those of the model, which are not always its drafter's
            raise ValueError("HyperMLA prefills layers of {} + {} and {} columns, not of {} + {} and {}, perhaps a "
                             """drafter's; give -ac '{{"mla_prefill_backend": "FLASH_ATTN"}}'""".format(
                                 NOPE, ROPE, VALUE, *found))

    @staticmethod
    def get_name():
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability):
        return device_capability is not None and (device_capability.major, device_capability.minor) == HOPPER

    @classmethod
    def validate_configuration(cls, device_capability, selector_config):
        reasons = super().validate_configuration(device_capability, selector_config)
        config = get_current_vllm_config_or_none()
        if config is not None and config.scheduler_config.max_num_seqs > MlaPrefill.MAX_REQUESTS:
            reasons.append(f"HyperMLA prefills at most {MlaPrefill.MAX_REQUESTS} requests at once; lower "
                           "--max-num-seqs")
        return reasons

    def clone(self):
        """The one that a builder of steps keeps: its kernels are loaded now, not when the first prompt waits."""
        made = super().clone()
        [new_tokens, *_], _ = made._causal, made._context
        logger.info_once("HyperMLA prefills new tokens: %s", new_tokens.explain())
        return made

    @functools.cached_property
    def _causal(self):
        """Of new tokens, or of the first pass; then of the second one, and of those behind it in turn: each has 26 MB,
        and two passes are what most steps have that have several."""
        return [self._prefill(causal=True) for _ in range(1 + self._may_pass)]

    @functools.cached_property
    def _context(self):
        return self._prefill(causal=False)

    def _prefill(self, causal):
        config = self.vllm_config
        return MlaPrefill(heads=self.num_heads, max_requests=MlaPrefill.MAX_REQUESTS,
                          max_query_tokens=MlaPrefill.MAX_QUERY_TOKENS, max_tokens=MlaPrefill.MAX_TOKENS,
                          dtype=config.model_config.dtype, causal=causal, scale=self.scale,
                          batch_invariant=envs.VLLM_BATCH_INVARIANT,
                          device=config.device_config.device)

    @functools.cached_property
    def _may_pass(self):
        """Whether contexts may come in passes: not where bits must not depend on others, as the cuts of a prompt would,
        nor where other GPUs have parts of them, nor where drafters may lengthen all requests, of which the lengths on
        the CPU do not tell."""
        drafts = self.vllm_config.speculative_config
        lengthened = drafts is not None and (drafts.method == "draft_model" or drafts.parallel_drafting)
        return not (envs.VLLM_BATCH_INVARIANT or lengthened
                    or self.vllm_config.parallel_config.decode_context_parallel_size > 1)

    def take_contexts(self, common, threshold, workspace):
        """Before vLLM's builder makes a step whose requests of more than `threshold` queries, behind all others, are
        prefills: if these have contexts, and the workspace has room for passes of them, returns the step as that
        builder is to see it, without contexts, which it would cut into chunks: more of the host's time than all else
        that it does."""
        self.passes = ()
        if not self._may_pass:
            return common
        # Lists, since a call of NumPy or PyTorch takes longer than a few requests do.
        count, starts = common.num_reqs, common.query_start_loc_cpu.tolist()
        first = next((i for i in range(count) if starts[i + 1] - starts[i] > threshold), None)
        if first is None:
            return common
        queries = [end - begin for begin, end in itertools.pairwise(starts[first:count + 1])]
        tokens = common.seq_lens_cpu_upper_bound.tolist()[first:count]  # of prefills exact, by which vLLM goes
        if tokens == queries:
            return common
        passes = _passes(tokens, min(len(workspace), MlaPrefill.MAX_TOKENS))
        if not passes:
            return common
        query_starts, token_starts = ([0, *itertools.accumulate(of)] for of in (queries, tokens))
        self.passes = [Pass(of, query_starts, token_starts, workspace) for of in passes]
        seen = copy.copy(common)
        seen.seq_lens_cpu_upper_bound = common.query_start_loc_cpu.diff()
        return seen

    def prepare_metadata(self, prefill_metadata):
        """Plans a step's new tokens, or its passes, for all layers."""
        super().prepare_metadata(prefill_metadata)
        self._planned = {}  # of each MlaPrefill where the token starts are that it is planned for
        for prefill, one in zip(self._causal, self.passes):
            self._plan(prefill, one.query_starts, one.token_starts)
        if not self.passes:
            starts = prefill_metadata.query_start_loc
            self._plan(self._causal[0], starts, starts)

    def _plan(self, prefill, query_starts, token_starts):
        """Once a step; in each layer, 3 us, if others have been planned since by the same one."""
        at = token_starts.data_ptr()
        if self._planned.get(prefill) != at:
            self._planned.pop(prefill, None)
            prefill.plan(query_starts, token_starts)
            self._planned[prefill] = at

    def run_pass(self, number, q, k, v, out):
        """Attention of a pass's queries over its tokens; as run_prefill_new_tokens()."""
        prefill, one = self._causal[min(number, len(self._causal) - 1)], self.passes[number]
        self._plan(prefill, one.query_starts, one.token_starts)
        self._run(prefill, q, k, v, out)

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        """q, k: [tokens, heads, 192], k also as the pair [tokens, heads, 128] and [tokens, 1, 64]; v: [tokens, heads,
        128]; any strides. Returns the output [tokens, heads, 128] and, if it is asked for, the log-sum-exp [heads,
        tokens] in the natural logarithm."""
        o, lse = self._run(self._causal[0], q, k, v, out)
        return (o, lse) if return_softmax_lse else o

    def run_prefill_context_chunk(self, q, k, v, chunk=None, chunk_idx=None, out=None):
        """Attention of new tokens over a chunk of their requests' contexts: of `chunk` in 0.33, before of number
        `chunk_idx` of the step. As run_prefill_new_tokens(), with the log-sum-exp: -inf of a request without tokens in
        the chunk."""
        if chunk is not None:
            query_starts, token_starts = chunk.query_start_loc, chunk.cu_seq_lens
        else:
            step = self._prefill_metadata
            query_starts, token_starts = step.query_start_loc, step.chunked_context.cu_seq_lens[chunk_idx]
        self._plan(self._context, query_starts, token_starts)
        return self._run(self._context, q, k, v, out)

    def _run(self, prefill, q, k, v, out):
        tokens, heads = q.shape[:2]
        if isinstance(k, tuple):
            k = k[0], k[1].expand(-1, heads, -1)
        if out is None:
            out = q.new_empty((tokens, heads, VALUE))
        lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
        prefill.run(q, k, v, out=out, lse=lse.T)
        return out, lse

    def supports_out(self):
        """0.33: run_prefill_..() write to `out`."""
        return True
