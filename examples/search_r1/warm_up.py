"""Recreates the checkpoint that ships with slime-searchr1: the supervised warm-up, in torch and transformers.

    python -m examples.search_r1.warm_up OUTPUT_FOLDER

``recipe`` describes what it teaches. Takes minutes on one core; writes a Hugging Face folder and prints how many
sampled responses to the held-out questions are right and well-formed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from examples.search_r1.recipe import MAX_CHARS, TOP_K, Piece, WarmUp, model_files, warm_up_batches
from examples.search_r1.task import tokenizer_files, world
from examples.tiny_model import EOS_ID, PAD_ID, write_files
from slime_searchr1.index import CORPUS, Index, read_corpus
from slime_searchr1.protocol import information, is_well_formed, read_turn
from slime_searchr1.reward import final_answer

GIVEN, TURN, PASSAGE = range(3)
"""Kinds of tokens: prompt or padding, a turn of the model, the result of a search."""


def main(output: Path, numbers: WarmUp) -> None:
    """Warm up a new model and write it to ``output``."""
    begun_s = time.monotonic()
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
        loss = loss_of(model, tokenizer, batch, passages_weight=numbers.passages_weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == numbers.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - begun_s:.0f} s", flush=True)
    model.save_pretrained(output)
    write_files(output, files=model_files())  # save_pretrained has rewritten config.json in another format
    report(model, tokenizer)


def loss_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batch: Sequence[tuple[str, Sequence[Piece]]],
    *,
    passages_weight: float,
) -> torch.Tensor:
    """Return the mean cross-entropy over the tokens of the model's turns, plus the weighted one over the passages."""
    rows = [_encoded(tokenizer, question, pieces) for question, pieces in batch]
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [PAD_ID] * (width - len(ids)) for ids, _ in rows])
    kinds_BT = torch.tensor([kinds + [GIVEN] * (width - len(kinds)) for _, kinds in rows])[:, 1:]
    hidden_BTH = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    of_turns, of_passages = (
        cross_entropy(model.lm_head(hidden_BTH[kinds_BT == kind]), ids_BT[:, 1:][kinds_BT == kind])
        for kind in (TURN, PASSAGE)
    )
    return of_turns + passages_weight * of_passages


def _encoded(tokenizer: PreTrainedTokenizerFast, question: str, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    ids = _prompt_ids(tokenizer, question)
    kinds = [GIVEN] * len(ids)
    for piece in pieces:
        added = tokenizer(piece.text, add_special_tokens=False)["input_ids"]
        ids += added
        kinds += [TURN if piece.is_turn else PASSAGE] * len(added)
    return ids, kinds


def _prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def report(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, turns: int = 3) -> None:
    """Print the fraction of right and of well-formed responses to held-out questions, sampled once each."""
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
    torch.set_num_threads(1)  # sums over several threads are not reproducible
    main(Path(sys.argv[1]), WarmUp())
