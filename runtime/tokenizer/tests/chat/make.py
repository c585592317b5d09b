"""Makes golden.json: chat templates rendered, encoded and masked by transformers.

    pip install transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6
    python3 make.py

Trains the small vocabulary of tokenizer.json on the book of recipes/data, renders every conversation by every template of
templates/, and writes text, ids and (where the template has generation marks) the mask. `null` stands for a refusal.
"""

import datetime, json, pathlib
from tokenizers import Tokenizer, AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
import transformers.utils.chat_template_utils as utils

HERE = pathlib.Path(__file__).parent
BOOK = HERE.parents[3] / "recipes/data/alice.txt"
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
            "<end_of_turn>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]"]

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a <city> & more.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "A city, e.g. 'Zürich'"}, "days": {"type": "integer", "default": 3}},
    "required": ["city"]}}}]

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich \"north\"", "days": 2, "share": 0.5, "tiny": 1e-7, "all": True, "none": None}}}


def turns(*contents, system=None):
    roles = ["user", "assistant"]
    found = [{"role": "system", "content": system}] if system else []
    return found + [{"role": roles[k % 2], "content": c} for k, c in enumerate(contents)]


CONVERSATIONS = [
    {"messages": turns("Hello", "Hi, what can I do?")},
    {"messages": turns("Hello", "Hi.", "Who is the Rabbit?", "A white one.", system="Answer briefly.")},
    {"messages": turns("  spaces around \n", "\n\n  and around the answer  \n", "again", "naïve 漢字 🙂 <b>&amp;</b>")},
    {"messages": turns("the same", "the same", "the same", "the same")},
    {"messages": turns("No answer yet"), "add_generation_prompt": True},
    {"messages": turns("a", "b", "c", system="s"), "add_generation_prompt": True},
    {"messages": turns("Two", "turns") + turns("of", "each")},
    {"messages": [{"role": "assistant", "content": "I begin."}]},
    {"messages": turns("How is it?", "Let me see.", "and?", "Sunny."), "tools": TOOLS},
    {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                  {"role": "tool", "content": "{\"sky\": \"blue\"}"}, {"role": "assistant", "content": "Blue sky."}], "tools": TOOLS},
    {"messages": turns("Think", "<think>\nhm, 1 + 1\n</think>\n\nTwo.", "More", "<think>\nagain\n</think>\n\nThree.")},
]


def tokenizer():
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    found.train_from_iterator(BOOK.read_text().split("\n\n"), trainer)
    found.save(str(HERE / "tokenizer.json"), pretty=False)
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>")


class Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def main():
    utils.datetime = Day
    fast = tokenizer()
    golden = []
    for path in sorted((HERE / "templates").glob("*.jinja")):
        fast.chat_template = path.read_text()
        marks = "{% generation %}" in fast.chat_template
        for number, one in enumerate(CONVERSATIONS):
            options = dict(tools=one.get("tools"), add_generation_prompt=one.get("add_generation_prompt", False))
            entry = {"template": path.stem, "conversation": number, "text": None, "ids": None, "mask": None}
            try:
                entry["text"] = fast.apply_chat_template(one["messages"], tokenize=False, **options)
                made = fast.apply_chat_template(one["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=marks, **options)
                entry["ids"] = made["input_ids"]
                entry["mask"] = made["assistant_masks"] if marks else None
            except Exception as e:
                entry["error"] = f"{type(e).__name__}: {e}"
            golden.append(entry)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in golden)
    (HERE / "golden.json").write_text('{"conversations": ' + json.dumps(CONVERSATIONS, ensure_ascii=False) + ',\n"rendered": [\n' + lines + "\n]}\n")


main()
