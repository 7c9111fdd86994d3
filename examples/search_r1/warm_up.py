"""Makes the checkpoint of slime-searchr1's invented world again: the supervised warm-up, in torch and transformers.

    python examples/search_r1/warm_up.py OUTPUT_FOLDER

What it teaches, and what it does not, stands in ``slime_searchr1/world/recipe.py``. Writes the Hugging Face folder
``model`` and the questions, ``data``, and prints how often sampled responses to the held-out ones are right and
well-formed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from slime_searchr1.index import CORPUS, Index, read_corpus
from slime_searchr1.protocol import information, is_well_formed, read_turn
from slime_searchr1.reward import final_answer
from slime_searchr1.world.recipe import MAX_CHARS, TOP_K, Piece, WarmUp, model_files, warm_up_batches
from slime_searchr1.world.task import EOS_ID, PAD_ID, data_files, tokenizer_files, world, write_files

NOT_TRAINED = -100
"""Target of a position that has no part in the loss."""


def main(folder: Path, numbers: WarmUp) -> None:
    """Warm up a new model and write it and the questions to ``folder``."""
    begun_s, output = time.monotonic(), folder / "model"
    write_files(folder / "data", files=data_files())
    write_files(output, files={**model_files(), **tokenizer_files()})
    tokenizer = AutoTokenizer.from_pretrained(output)
    torch.manual_seed(numbers.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(output), dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=numbers.lr,
        betas=(numbers.adam_beta1, numbers.adam_beta2),
        weight_decay=numbers.weight_decay,
    )
    for step, batch in enumerate(warm_up_batches(numbers)):
        for group in optimizer.param_groups:
            group["lr"] = numbers.learning_rate(step)
        loss = loss_of(model, tokenizer, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == numbers.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - begun_s:.0f} s", flush=True)
    model.save_pretrained(output)
    write_files(output, files=model_files())  # transformers rewrote the config in its own words
    report(model, tokenizer)


def loss_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, batch: Sequence[tuple[str, Sequence[Piece]]]
) -> torch.Tensor:
    """The mean cross-entropy over the tokens of the model's turns."""
    rows = [_encoded(tokenizer, question, pieces) for question, pieces in batch]
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [PAD_ID] * (width - len(ids)) for ids, _ in rows])
    mask_BT = torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows])
    targets_BT = torch.where(mask_BT == 1, ids_BT, NOT_TRAINED)[:, 1:]
    hidden_BTH = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    is_target = targets_BT != NOT_TRAINED
    return cross_entropy(model.lm_head(hidden_BTH[is_target]), targets_BT[is_target])


def _encoded(tokenizer: PreTrainedTokenizerFast, question: str, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    ids = _prompt_ids(tokenizer, question)
    mask = [0] * len(ids)
    for piece in pieces:
        added = tokenizer(piece.text, add_special_tokens=False)["input_ids"]
        ids += added
        mask += [int(piece.is_trained)] * len(added)
    return ids, mask


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def report(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, turns: int = 3) -> None:
    """Print the share of right and of well-formed responses to held-out questions, sampled once each."""
    index, questions = Index(read_corpus(CORPUS)), world().held_out
    stops = [tokenizer.convert_tokens_to_ids(one) for one in ("</search>", "</answer>")]
    responses = [""] * len(questions)
    tokenizer.padding_side = "left"
    going = set(range(len(questions)))
    for _ in range(turns):
        places = sorted(going)
        texts = [f"<|user|>{questions[at].prompt}<|assistant|>{responses[at]}" for at in places]
        given = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        ids = model.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            max_new_tokens=16,
            do_sample=True,
            eos_token_id=[*stops, EOS_ID],
            pad_token_id=PAD_ID,
        )
        for at, row in zip(places, ids[:, given["input_ids"].size(1) :], strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            responses[at] += text
            action = read_turn(text)
            if action is None or action.kind == "answer":
                going.discard(at)
                continue
            found = [one.contents for one in index.search(action.text, TOP_K)]
            responses[at] += information(found, max_chars=MAX_CHARS)
    for hops in (1, 2):
        own = [(q, r) for q, r in zip(questions, responses, strict=True) if len(q.relations) == hops]
        right = sum(final_answer(response) == question.answer for question, response in own)
        formed = sum(is_well_formed(response) for _, response in own)
        searches = sum(response.count("</search>") for _, response in own)
        print(
            f"held out, {hops} hops: {right}/{len(own)} right, {formed}/{len(own)} well-formed, "
            f"{searches / len(own):.2f} searches"
        )


if __name__ == "__main__":
    torch.set_num_threads(2)
    main(Path(sys.argv[1]), WarmUp())
