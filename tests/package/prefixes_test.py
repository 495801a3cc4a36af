"""The vLLM plug-in's decompressed prefixes against MlaDecode over all tokens. Skipped (77) where PyTorch is not
installed."""

import pathlib
import random
import sys
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from support import BUILD

try:
    import torch
except ImportError:
    print("PyTorch is not installed")
    sys.exit(77)

sys.path.insert(0, str(BUILD / "python"))
import hypermla
from hypermla.vllm import prefixes

HEADS, PAGE, WIDTH, PAGES, LATENT, REQUESTS = 16, 64, 8, 120, 512, 8
SCALE = 192**-0.5
WHAT_PAYS = prefixes.saved_us  # which tests replace


class Engine:
    """A layer with its cache and requests, which have pages, tokens and queries of the step to come."""

    def __init__(self, tokens=6 * PAGE):
        torch.manual_seed(1)
        device = str(torch.get_default_device())
        normal = lambda *shape: torch.randn(shape).bfloat16()
        self.cache = torch.full((PAGES, PAGE, 576), torch.nan).bfloat16()
        self.w_uk, self.w_uv = normal(HEADS, 128, LATENT) / 23, normal(HEADS, LATENT, 128) / 23
        self.free = torch.randperm(PAGES).tolist()
        self.requests, self.fills = [], 0
        self.layer = prefixes.Decompressed(tokens, HEADS, torch.bfloat16, device)
        self.shared = prefixes.SharedPrefixes(HEADS, REQUESTS, 3 * REQUESTS, WIDTH, PAGE, torch.bfloat16, SCALE,
                                              tokens, device)
        new = lambda: hypermla.MlaDecode(heads=HEADS, max_requests=REQUESTS, max_queries=3, max_tokens=PAGE * WIDTH,
                                         page=PAGE, device=device)
        self.decode, self.whole = new(), new()

    def write(self, page, tokens=PAGE):
        self.cache[page, :tokens] = torch.randn(tokens, 576).bfloat16()

    def prompt(self, count):
        """Pages of a prompt of whole pages."""
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.write(page)
        return pages

    def add(self, prompt, tokens):
        """A request behind a prompt, with so many tokens of its own."""
        own = [self.free.pop() for _ in range(WIDTH - len(prompt))]
        for page in own:
            self.write(page)
        self.requests.append([prompt + own, len(prompt) * PAGE + tokens])

    def project(self, latents):
        weights = torch.cat((self.w_uk, self.w_uv.transpose(1, 2)), 1).flatten(0, 1)
        return latents @ weights.T

    def fill(self, pages, first_token):
        self.fills += 1
        self.layer.fill(self.cache, pages, first_token, self.project)
        return PAGES

    def rewrite(self, pages):
        """A step in which a request prefills these pages anew."""
        for page in pages:
            self.write(page)
        self.step(prefilling=[(pages + [-1] * (WIDTH - len(pages)), len(pages) * PAGE, len(pages) * PAGE)])

    def step(self, queries=1, pad=0, prefilling=(), fits=True):
        """How far outputs are from those without a prefix, and how many tokens MlaDecode had less to attend to.
        prefilling: requests behind those that decode, [pages, tokens, queries]."""
        for request in self.requests:
            request[1] += queries
        integers = lambda values: torch.tensor(values, dtype=torch.int32)
        count = len(self.requests)
        decodes = count + pad
        table = integers([pages for pages, _ in self.requests] + [[-1] * WIDTH] * pad + [one[0] for one in prefilling])
        table = table.view(-1, WIDTH)
        lengths = integers([tokens for _, tokens in self.requests] + [0] * pad + [one[1] for one in prefilling])
        starts = [min(i, count) * queries for i in range(decodes + 1)]
        for *_, more in prefilling:
            starts.append(starts[-1] + more)
        slots = [-1] * pad
        for pages, tokens, new in [*((*one, queries) for one in self.requests), *prefilling]:
            slots += [pages[at // PAGE] * PAGE + at % PAGE for at in range(tokens - new, tokens)]
        starts, slots = integers(starts), torch.tensor(slots, dtype=torch.int64)
        q = torch.randn(count * queries, HEADS, 192).bfloat16()
        absorbed = torch.einsum("thc,hcl->thl", q[..., :128].float(), self.w_uk.float()).bfloat16(), q[..., 128:]
        projected = lambda o: torch.einsum("thl,hlv->thv", o.float(), self.w_uv.float()).bfloat16()

        own_table, own = self.shared.plan(table, lengths, starts, slots, decodes, self.fill, fits)
        if not count:
            return 0.0, []
        table, lengths, starts = table[:decodes], lengths[:decodes], starts[:decodes + 1]
        self.decode.plan(own, starts)
        o, lse = self.decode.run(absorbed, self.cache, own_table)
        out = projected(o)
        self.shared.attend(self.layer, q, out, lse)

        self.whole.plan(lengths, starts)
        wanted, wanted_lse = self.whole.run(absorbed, self.cache, table)
        off = torch.maximum((out.float() - projected(wanted).float()).abs().max(), (lse - wanted_lse).abs().max())
        return off.item(), (lengths - own).tolist()


def saved_us(heads, queries, tokens, fp8):
    return queries * tokens if queries >= 3 and tokens >= 2 * PAGE else 0


@mock.patch.multiple(prefixes, saved_us=saved_us, STEPS=2)
class SharedPrefixes(unittest.TestCase):
    device = "cpu"

    def samples(self):
        """An engine with four samples of a prompt, and its pages."""
        engine = Engine()
        prompt = engine.prompt(5)
        for tokens in (3, 1, 40, 17):
            engine.add(prompt, tokens)
        return engine, prompt

    def steps(self, engine, count, **of_step):
        """What the last of these steps left out for MlaDecode; all of them are right."""
        for _ in range(count):
            off, left_out = engine.step(**of_step)
            self.assertTrue(off <= 0.02, off)
        return left_out

    def setUp(self):
        if self.device == "cuda" and not torch.cuda.is_available():
            self.skipTest("there is no GPU")
        torch.set_default_device(self.device)
        self.addCleanup(torch.set_default_device, "cpu")

    def test_samples_of_a_prompt(self):
        engine = Engine()
        prompt = engine.prompt(5)
        engine.add([], 30)
        for tokens in (3, 1, 40, 17):
            engine.add(prompt, tokens)
        engine.add(prompt[:3], 3 * PAGE)
        self.assertEqual(self.steps(engine, 1, pad=2), [0] * 8)  # which is looked at before the next one
        self.assertEqual(self.steps(engine, 1, pad=2), [0, *[5 * PAGE] * 4, 0, 0, 0])
        self.assertEqual(self.steps(engine, 6, queries=3, pad=1), [0, *[5 * PAGE] * 4, 0, 0])
        engine.requests.pop()
        longer = engine.requests[-1][0], 6 * PAGE, 20  # it shares the prefix, and is no decode
        self.assertEqual(self.steps(engine, 1, prefilling=[longer]), [0, *[5 * PAGE] * 4])
        self.assertEqual(engine.fills, 1)

    def test_any_stream_of_steps(self):
        """Requests come, end and change places, and pages go from prompt to prompt."""
        shared = fills = 0
        for seed in range(4):
            dice, engine, prompts = random.Random(seed), Engine(8 * PAGE), []
            for _ in range(40):
                turn = dice.random()
                if turn < 0.3 and len(engine.requests) < REQUESTS and len(engine.free) > 2 * WIDTH:
                    prompts.append(engine.prompt(dice.randint(1, 6)) if dice.random() < 0.3 or not prompts
                                   else dice.choice(prompts))
                    engine.add(prompts[-1][:dice.randint(1, 6)], dice.randint(0, 40))
                elif turn < 0.45 and engine.requests:
                    engine.requests.pop(dice.randrange(len(engine.requests)))
                elif turn < 0.55:
                    dice.shuffle(engine.requests)
                elif turn < 0.7 and prompts:  # all that have it end, another writes its pages, some come again
                    given = dice.choice(prompts)
                    ended = [one for one in engine.requests if one[0][0] == given[0]]
                    engine.requests = [one for one in engine.requests if one not in ended]
                    if dice.random() < 0.5:
                        engine.rewrite(given[:dice.randint(1, len(given))])
                    engine.requests += ended
                engine.requests = [one for one in engine.requests if one[1] < WIDTH * PAGE - 4]
                shared += sum(self.steps(engine, 1, queries=dice.randint(1, 3),
                                         pad=dice.randint(0, REQUESTS - len(engine.requests))))
            fills += engine.fills
        self.assertGreater(shared, 40 * PAGE)
        self.assertGreater(fills, 8)

    def test_few_queries_or_tokens_share_nothing(self):
        engine = Engine()
        few, short = engine.prompt(5), engine.prompt(1)
        for prompt in (few, few, short, short, short, short):
            engine.add(prompt, 20)
        self.assertEqual(self.steps(engine, 6), [0] * 6)
        self.assertEqual(engine.fills, 0)

    def test_a_prefix_that_nobody_has_stays(self):
        engine, prompt = self.samples()
        self.assertEqual(self.steps(engine, 4), [5 * PAGE] * 4)
        sharing, engine.requests = engine.requests, []
        self.steps(engine, 3)  # steps without any request
        engine.add([], 50)
        self.assertEqual(self.steps(engine, 3), [0])
        engine.requests += sharing
        self.assertEqual(self.steps(engine, 1), [0, *[5 * PAGE] * 4])
        self.assertEqual(engine.fills, 1)

    def test_pages_that_are_given_to_others_are_not_taken_for_the_prefix(self):
        engine, prompt = self.samples()
        self.assertEqual(self.steps(engine, 4), [5 * PAGE] * 4)
        for pages in (prompt, prompt[3:4], prompt[4:]):  # which another request has first, or all of them
            sharing, engine.requests = engine.requests, []
            engine.rewrite(pages)
            engine.requests = sharing
            self.assertEqual(self.steps(engine, 1), [0] * 4)
            self.assertEqual(self.steps(engine, 5), [5 * PAGE] * 4)  # all of them right
        self.assertEqual(engine.fills, 4)

    def test_pages_that_a_request_writes_are_not_taken_for_the_prefix(self):
        engine, prompt = self.samples()
        self.assertEqual(self.steps(engine, 4), [5 * PAGE] * 4)
        # All of them ended; one writes the last page anew, and others have it from the prefix cache in the same step.
        own = engine.requests.pop()[0][5:]
        for request in engine.requests:
            request[1] = 5 * PAGE
        engine.write(prompt[-1])
        self.assertEqual(self.steps(engine, 1, prefilling=[(prompt + own, 5 * PAGE, PAGE)]), [0] * 3)
        self.assertEqual(self.steps(engine, 5), [5 * PAGE] * 3)
        self.assertEqual(engine.fills, 2)

    def test_new_weights(self):
        engine, prompt = self.samples()
        self.assertEqual(self.steps(engine, 4), [5 * PAGE] * 4)
        engine.w_uk, engine.w_uv = engine.w_uk.flip(1), engine.w_uv.flip(2)
        engine.shared.drop()
        self.assertEqual(self.steps(engine, 1), [0] * 4)
        self.assertEqual(self.steps(engine, 4), [5 * PAGE] * 4)
        self.assertEqual(engine.fills, 2)

    def test_a_step_of_too_many_queries_shares_nothing(self):
        engine, prompt = self.samples()
        self.assertEqual(self.steps(engine, 4), [5 * PAGE] * 4)
        self.assertEqual(self.steps(engine, 1, queries=3, fits=False), [0] * 4)
        self.assertEqual(self.steps(engine, 1), [5 * PAGE] * 4)
        engine.write(prompt[2])
        writes = [(prompt[:3] + [-1] * (WIDTH - 3), 3 * PAGE, PAGE)]
        self.assertEqual(self.steps(engine, 1, fits=False, prefilling=writes), [0] * 4)
        self.assertEqual(self.steps(engine, 1), [0] * 4)  # it was seen all the same
        self.assertEqual(engine.fills, 1)

    def test_few_of_those_that_share_it(self):
        engine, prompt = self.samples()
        self.assertEqual(self.steps(engine, 4), [5 * PAGE] * 4)
        left, engine.requests = engine.requests[2:], engine.requests[:2]
        self.assertEqual(self.steps(engine, 1), [0] * 2)  # at once, where it does not pay
        self.assertEqual(self.steps(engine, 4, queries=2), [5 * PAGE] * 2)
        engine.requests += left
        self.assertEqual(self.steps(engine, 1), [5 * PAGE] * 4)
        self.assertEqual(engine.fills, 1)

    def test_what_pays(self):
        both, neither = (True, True), (False, False)  # over a cache of the model's type, in FP8
        for heads, queries, tokens, pays in ((16, 64, 8192, both), (16, 512, 1024, both), (128, 128, 8192, both),
                                             (128, 64, 8192, (True, False)), (16, 16, 8192, neither),
                                             (128, 32, 8192, neither), (16, 64, 512, neither)):
            found = tuple(WHAT_PAYS(heads, queries, tokens, fp8) > 0 for fp8 in (False, True))
            self.assertEqual(found, pays, (heads, queries, tokens))

    def test_requests_anywhere_share(self):
        engine = Engine(9 * PAGE)
        first, second = engine.prompt(4), engine.prompt(5)
        for number in range(8):
            engine.add((first, second, [])[number % 3] if number < 7 else second, 33)
        wanted = [4 * PAGE, 5 * PAGE, 0, 4 * PAGE, 5 * PAGE, 0, 4 * PAGE, 5 * PAGE]
        self.assertEqual(self.steps(engine, 6), wanted)
        self.assertEqual(self.steps(engine, 1, queries=3), wanted)
        engine.requests.reverse()
        self.assertEqual(self.steps(engine, 1), wanted[::-1])
        self.assertEqual(engine.fills, 2)

    def test_the_prefix_that_saves_most_has_the_room(self):
        engine = Engine()  # for one of both
        first, second = engine.prompt(3), engine.prompt(5)
        for prompt in (first, first, first, second, second, second):
            engine.add(prompt, 2 * PAGE + 20)
        self.assertEqual(self.steps(engine, 4), [0, 0, 0, *[5 * PAGE] * 3])
        self.assertEqual(self.steps(engine, 4), [0, 0, 0, *[5 * PAGE] * 3])
        engine.requests = engine.requests[:4]
        self.assertEqual(self.steps(engine, 4), [*[3 * PAGE] * 3, 0])  # of the other, one is too few
        self.assertEqual(engine.fills, 2)

    def test_the_oldest_makes_room(self):
        engine = Engine(9 * PAGE)
        prompts = [engine.prompt(3) for _ in range(4)]
        for prompt in (*prompts, prompts[1], prompts[0]):  # the first goes when the fourth comes
            engine.requests.clear()
            engine.free = [page for page in range(PAGES) if page not in sum(prompts, [])]
            self.steps(engine, 1)
            for _ in range(3):
                engine.add(prompt, 20)
            self.assertEqual(self.steps(engine, 4), [3 * PAGE] * 3)
        self.assertEqual(engine.fills, 5)

    def test_looks_are_rare_where_nothing_changes(self):
        engine, prompt = self.samples()
        self.steps(engine, 4)
        with mock.patch.object(engine.shared, "_choose", side_effect=engine.shared._choose) as choose:
            self.steps(engine, 2 * prefixes.QUIET)
            self.assertIn(choose.call_count, (1, 2))
            engine.requests.pop()
            self.steps(engine, 4)
            self.assertIn(choose.call_count, (2, 3))

    def test_a_longer_prefix_takes_the_place_of_a_shorter_one(self):
        engine = Engine()
        prompt = engine.prompt(5)
        for _ in range(3):
            engine.add(prompt[:3], 20)
        self.assertEqual(self.steps(engine, 4), [3 * PAGE] * 3)
        engine.requests.clear()
        for _ in range(4):
            engine.add(prompt, 20)
        self.assertEqual(self.steps(engine, 1), [3 * PAGE] * 4)
        self.assertEqual(self.steps(engine, 4), [5 * PAGE] * 4)
        self.assertEqual(engine.fills, 2)

    def test_a_prefix_of_prefixes(self):
        engine = Engine(9 * PAGE)
        prompt = engine.prompt(5)
        for pages in (5, 5, 5, 3, 3, 3):
            engine.add(prompt[:pages], 20)
        self.assertEqual(self.steps(engine, 8), [*[5 * PAGE] * 3, *[3 * PAGE] * 3])
        self.assertEqual(engine.fills, 2)

    def test_a_prefix_has_as_many_tokens_as_there_is_room_for(self):
        engine = Engine(tokens=3 * PAGE + 5)
        prompt = engine.prompt(5)
        for tokens in (3, 1, 40):
            engine.add(prompt, tokens)
        self.assertEqual(self.steps(engine, 4), [3 * PAGE] * 3)

    def test_tokens_of_the_step_are_no_prefix(self):
        engine = Engine()
        prompt = engine.prompt(4)
        for _ in range(4):
            engine.add(prompt, -PAGE // 2)  # the last page is not full
        self.assertEqual(self.steps(engine, 4), [3 * PAGE] * 4)
        engine.add(prompt, -3 * PAGE // 2)
        self.assertEqual(self.steps(engine, 1), [0] * 5)  # as if that one wrote the pages


class SharedPrefixesOnAGpu(SharedPrefixes):
    device = "cuda"

    def steps(self, engine, count, **of_step):
        left_out = []
        for _ in range(count):
            left_out = super().steps(engine, 1, **of_step)
            torch.cuda.synchronize()  # what was looked at arrives
        return left_out


if __name__ == "__main__":
    unittest.main()
