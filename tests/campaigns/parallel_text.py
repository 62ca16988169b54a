"""What is done with a parallel language model as one: tokens generated, caches gone on with, texts in one row."""

from __future__ import annotations

from typing import Any

import torch
from parallel_model import LivingModel

import weft


class TextLife(LivingModel):
    """Acts of a life that language models alone have."""

    def generate(self) -> None:
        """Token by token what Hugging Face chooses, unless two tokens are equally likely."""
        rng = self.rng
        prompts = [[rng.randrange(self.words) for _ in range(rng.randint(1, 12))] for _ in range(rng.randint(1, 4))]
        new, eos = rng.randint(0, 5), rng.choice(((), rng.randrange(self.words)))
        got = weft.generate(self.shared, prompts, max_new_tokens=new, eos=eos)
        if rng.random() < 0.3:
            drawn = {"temperature": 1.3, "top_k": rng.choice((None, 3)), "top_p": rng.choice((None, 0.7)), "seed": 5}
            once, twice = (weft.generate(self.shared, prompts, max_new_tokens=2, eos=(), **drawn) for _ in range(2))
            if once != twice or any(not 0 <= t < self.words for tokens in once for t in tokens):
                raise AssertionError(f"sampled {once} and then {twice}")
        if self.alone is None:
            return
        for prompt, tokens in zip(prompts, got, strict=True):
            self._check_tokens(prompt, tokens, new, set() if eos == () else {eos})

    def generate_as_hugging_face(self) -> None:
        """`model.generate()` on a batch that is padded on the left; its tokens are checked against the plain model."""
        ids, mask, _ = self.batch(side="left")
        ids = ids.masked_fill(mask == 0, 0)
        options = {"attention_mask": mask, "max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}
        way = self.rng.choice(({}, {"use_cache": False}, {"num_beams": 2}))
        self.say(str(way))
        model: Any = self.shared
        if self.fsdp:
            return  # a step is a call, which gathers anew
        got = model.generate(ids, do_sample=False, **options, **way)
        if self.alone is None:
            return
        want = self.alone.generate(ids, do_sample=False, **options, **way)
        if not torch.equal(got, want):
            if "num_beams" in way:
                return  # equally likely beams
            with torch.no_grad():
                longer = torch.nn.functional.pad(mask, (0, 2), value=1)
                positions = (longer.cumsum(1) - 1).clamp(min=0)
                logits = self.alone(got[:, :-1], attention_mask=longer, position_ids=positions).logits[:, -3:]
            chosen = logits.gather(2, got[:, -3:, None])[..., 0]
            self.close(chosen, logits.max(2).values, "tokens of generate()")

    def go_on(self) -> None:
        """A cache of one call, gone on with in others, past the room that it was made with."""
        ids, mask, _ = self.batch(side="left")
        more = [self.rng.randint(1, 4) for _ in range(2)]
        total = ids.shape[1] + sum(more)
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        longer = torch.nn.functional.pad(mask, (0, sum(more)), value=1)
        tokens = torch.cat([ids, torch.randint(1, self.words, (ids.shape[0], sum(more)), generator=generator)], 1)
        positions = (longer.cumsum(1) - 1).clamp(min=0)
        at, cache, found = 0, None, []
        with torch.no_grad():
            for step in (ids.shape[1], *more):
                end = at + step
                out = self.shared(
                    tokens[:, at:end], attention_mask=longer[:, :end], position_ids=positions[:, at:end],
                    past_key_values=cache, use_cache=True,
                )  # fmt: skip
                cache, at = out.past_key_values, end
                found.append(out.logits)
            if self.alone is not None and at == total:
                want = self.alone(tokens, attention_mask=longer, position_ids=positions).logits
                self.close(torch.cat(found, 1)[longer.bool()], want[longer.bool()], "going on with a cache")

    def flattened(self) -> None:
        """A row of several texts, whose positions restart, at times elsewhere than at 0; with a loss or without."""
        lengths = [self.rng.randint(1, 9) for _ in range(self.rng.randint(1, 4))]
        first = [self.rng.choice((0, 0, 5)) for _ in lengths]
        positions = torch.cat([torch.arange(n) + at for n, at in zip(lengths, first, strict=True)])[None]
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        ids = torch.randint(1, self.words, (1, sum(lengths)), generator=generator)
        given: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        if bool((positions.diff() == 1).any()) and self.rng.random() < 0.5:
            given["labels"] = ids.masked_fill(torch.nn.functional.pad(positions.diff() != 1, (1, 0), value=True), -100)
        self.say(f"{lengths} {'labels' if 'labels' in given else ''}")
        with torch.no_grad():
            got = self.shared(**given)
            if self.alone is None:
                return
            want = self.alone(**given, use_cache=False)
        if "labels" in given:
            self.close(got.loss, want.loss, "loss of a flattened row")
            return
        self.close(got.logits, want.logits, "a flattened row")
