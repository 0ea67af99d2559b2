"""Questions: every source, what is kept as it is, what is refused, held-out shares, rendered prompts, the command."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import tasks
from tasks import Question, chat_template_note, fingerprint, hold_out, load_questions, render_prompts

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
CHAT = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|turn|>system\nBe brief.<|end|>{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
ROW = {"question": "What is 7 * 2?", "answer": "14", "verify_type": "LAST_NUMBER"}


def lines(path, rows, **options):
    path.write_text("".join(json.dumps(row, **options) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def text_file(path, text):
    path.write_bytes(text.encode())
    return str(path)


def refusal(call, *args, **options):
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    return str(error.value)


def byte_tokenizer(chat_template=None, adds="bos"):
    """One token a byte, with special tokens; adds: which of them the tokenizer itself puts around plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<s>", "</s>", "<|turn|>", "<|end|>"]
    model = Tokenizer(models.BPE({token: i for i, token in enumerate(specials + alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    around = {"": "$A", "bos": "<s> $A", "both": "<s> $A </s>", "eos": "$A </s>"}[adds]
    if adds:
        model.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", additional_special_tokens=specials[2:]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def asked(*questions):
    return [Question(question, "14", "LAST_NUMBER", {}, f"q.jsonl row {i}") for i, question in enumerate(questions, 1)]


# ------------------------------------------------------------------------------------------------ what is kept
def test_G01_mixed_types_of_answers_load(tmp_path):
    rows = [ROW | {"answer": answer} for answer in ("14", 14, "14.5", 14.5, -3)]
    for name in ("mixed.jsonl", "mixed.json"):
        path = lines(tmp_path / name, rows)
        assert [q.answer for q in load_questions(path)] == ["14", "14", "14.5", "14.5", "-3"]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    assert [q.answer for q in load_questions(str(tmp_path / "list.json"))] == ["14", "14", "14.5", "14.5", "-3"]


def test_G01_numbers_of_json_keep_their_spelling_and_stay_numbers_in_the_row(tmp_path):
    spellings = ["0.12345678901234567890", "14.50", "3.5e2", "1e400", "123456789012345678901234567890"]
    row = '{"question": "q?", "answer": %s, "verify_type": "LAST_NUMBER", "tolerance": 0.5}\n'
    questions = load_questions(text_file(tmp_path / "a.jsonl", "".join(row % spelling for spelling in spellings)))
    assert [q.answer for q in questions] == spellings
    assert all(isinstance(q.row["tolerance"], float) and q.row["tolerance"] * 2 == 1 for q in questions)


def test_G01_a_broken_line_is_named(tmp_path):
    path = text_file(tmp_path / "a.jsonl", json.dumps(ROW) + "\n\n" + '{"question": "x", \n')
    assert refusal(load_questions, path).startswith("a.jsonl row 3 is not valid JSON: ")
    path = text_file(tmp_path / "a.json", '[{"question": "x"},\n {"question" "y"}]')
    assert refusal(load_questions, path).startswith("a.json line 2 is not valid JSON: ")
    path = text_file(tmp_path / "b.jsonl", json.dumps(ROW) + '\n["q", "a"]\n')
    assert "b.jsonl row 2 is a list" in refusal(load_questions, path)


def test_G03_csv_cells_stay_text(tmp_path):
    rows = (
        'question,answer,verify_type,note\nNone,7,EXACT,\nnull?,NA,EXACT,NaN\n"1,5\nor 2?",007,LAST_NUMBER,true\nTrue,'
        " 14.0 ,EXACT,x\n"
    )
    questions = load_questions(text_file(tmp_path / "a.csv", "\ufeff" + rows.replace("\n", "\r\n")))
    assert [q.question for q in questions] == ["None", "null?", "1,5\r\nor 2?", "True"]
    assert [q.answer for q in questions] == ["7", "NA", "007", " 14.0 "]
    assert [q.row["note"] for q in questions] == ["", "NaN", "true", "x"]


@pytest.mark.parametrize("column", ["question", "answer"])
@pytest.mark.parametrize("blank", ["", "  ", "\t"])
def test_G03_a_blank_cell_is_refused_with_its_row(tmp_path, column, blank):
    good = "why?,7,EXACT\n"
    bad = f'"{blank}",7,EXACT\n' if column == "question" else f'why?,"{blank}",EXACT\n'
    path = text_file(tmp_path / "a.csv", "question,answer,verify_type\n" + good + good + bad)
    assert f"a.csv row 3 has a blank {column}" in refusal(load_questions, path)


@pytest.mark.parametrize("column", ["question", "answer", "verify_type"])
@pytest.mark.parametrize("value", ["null", "NaN", '""', '" \\n"'])
def test_G03_G04_a_blank_json_value_is_refused_with_its_row(tmp_path, column, value):
    bad = json.dumps(ROW | {column: "@"}).replace('"@"', value)
    path = text_file(tmp_path / "a.jsonl", f"{json.dumps(ROW)}\n{bad}\n")
    assert f"a.jsonl row 2 has a blank {column}" in refusal(load_questions, path)


@pytest.mark.parametrize("answer, kind", [(True, "bool"), (["14"], "list"), ({"value": 14}, "dict")])
def test_an_answer_that_is_no_text_or_number_is_refused(tmp_path, answer, kind):
    path = lines(tmp_path / "a.jsonl", [ROW, ROW | {"answer": answer}])
    assert f"a.jsonl row 2 has a {kind} as its answer" in refusal(load_questions, path)


def test_G03_parquet_values_are_not_changed_by_a_blank_neighbour(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def write(name, **columns):
        pq.write_table(pa.table(columns), tmp_path / name)
        return str(tmp_path / name)

    three = dict(question=["None", "NA", "x"], verify_type=["EXACT"] * 3)
    questions = load_questions(write("a.parquet", answer=pa.array([7, 10**17 + 1, 3]), size=[1, None, 3], **three))
    assert [q.question for q in questions] == ["None", "NA", "x"]
    assert [q.answer for q in questions] == ["7", str(10**17 + 1), "3"]
    assert [q.row["size"] for q in questions] == [1, None, 3]
    path = write("b.parquet", answer=["007", None, "3"], **three)
    assert "b.parquet row 2 has a blank answer" in refusal(load_questions, path)
    assert "c.parquet cannot be read as Parquet" in refusal(load_questions, text_file(tmp_path / "c.parquet", "no"))


def test_G04_the_verify_type_is_kept_as_given_or_filled_from_the_setting(tmp_path):
    rows = [ROW | {"verify_type": " last_number "}, ROW | {"verify_type": "LAST_NUMBERS"}, ROW | {"verify_type": None}]
    rows.append({key: ROW[key] for key in ("question", "answer")})
    path = lines(tmp_path / "a.jsonl", rows)
    kinds = [q.verify_type for q in load_questions(path, verify_type="EXACT")]
    assert kinds == [" last_number ", "LAST_NUMBERS", "EXACT", "EXACT"]
    assert "a.jsonl row 3 has a blank verify_type" in refusal(load_questions, path)


def test_G06_missing_columns_are_named_beside_those_found(tmp_path):
    rows = [{"problem": "What is 7 * 2?", "solution": "14", "level": 1}]
    for path in (lines(tmp_path / "a.jsonl", rows), text_file(tmp_path / "a.csv", "problem,solution,level\nx,14,1\n")):
        message = refusal(load_questions, path)
        assert "row 1 has no 'question', 'answer', 'verify_type', it has 'problem', 'solution', 'level'" in message
        assert "--columns question=...,answer=..." in message and "--verify_type" in message
        assert "has no 'answer', it has" in refusal(
            load_questions, path, columns={"question": "problem"}, verify_type="LAST_NUMBER"
        )


def test_G06_a_mapping_reads_other_columns(tmp_path):
    path = lines(
        tmp_path / "a.jsonl", [{"problem": "What is 7 * 2?", "solution": 14, "given": [1, 2], "kind": "EXACT"}]
    )
    columns = {"question": "problem", "answer": "solution"}
    (q,) = load_questions(path, columns=columns, verify_type="LAST_NUMBER")
    assert (q.question, q.answer, q.verify_type, q.place) == ("What is 7 * 2?", "14", "LAST_NUMBER", "a.jsonl row 1")
    (q,) = load_questions(
        path, columns=columns | {"verify_type": "kind", "numbers": "given"}, verify_type="LAST_NUMBER"
    )
    assert q.verify_type == "EXACT" and q.row["numbers"] == [1, 2] == q.row["given"]
    assert "has no 'task', it has" in refusal(load_questions, path, columns=columns | {"verify_type": "task"})


def test_G07_worked_golds_arrive_whole(tmp_path):
    path = lines(tmp_path / "a.jsonl", [ROW | {"answer": "6+8=14, so #### 14"}])
    assert load_questions(path)[0].answer == "6+8=14, so #### 14"


def test_gsm8k_format_loads_without_conversion():
    questions = load_questions(DATA / "gsm8k_rows.jsonl", verify_type="HASH_NUMBER")
    assert [q.answer.rpartition("#### ")[2] for q in questions] == ["3", "14", "109,200,000", "-7"]
    assert questions[0].question.startswith("A robe takes 2 bolts") and questions[0].answer.startswith(
        "It takes 2/2=<<"
    )
    rewards = pytest.importorskip("rewards")
    rewards.read_golds(questions)
    right = ["#### 3", "so\n#### 14.0", "#### 109200000", "it is #### -7"]
    assert rewards.grade(list(zip(right, questions))) == [1.0] * 4
    assert rewards.grade([(q.answer, q) for q in questions]) == [1.0] * 4
    assert rewards.grade(list(zip(["#### 4", "14", "#### 109", "#### 7"], questions))) == [0.0] * 4


def test_math_format_loads_without_conversion():
    columns = {"question": "problem", "answer": "solution"}
    questions = load_questions(DATA / "math_rows.jsonl", columns=columns, verify_type="MATH")
    assert [q.row["level"] for q in questions] == ["Level 2", "Level 3", "Level 1"]
    assert all("\\boxed{" in q.answer and "$" in q.question + q.answer for q in questions)
    rewards = pytest.importorskip("rewards")
    rewards.read_golds(questions)
    right = ["\\boxed{9}", "It is \\boxed{0.25}", "\\boxed{\\sqrt{72}}"]
    assert rewards.grade(list(zip(right, questions))) == [1.0] * 3
    assert rewards.grade(list(zip(["\\boxed{2}", "\\boxed{\\frac{1}{2}}", "\\boxed{6}"], questions))) == [0.0] * 3


# ------------------------------------------------------------------------------------------------ sources
def test_every_kind_of_source_gives_the_same_questions(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [ROW | {"question": f"What is {i} * 2?", "answer": str(2 * i)} for i in range(5)]
    (tmp_path / "shards").mkdir()
    lines(tmp_path / "shards" / "part-0.jsonl", rows[:2])
    lines(tmp_path / "shards" / "part-1.jsonl", rows[2:])
    (tmp_path / "single" / "algebra").mkdir(parents=True)
    for i, row in enumerate(rows):  # one object a file, as MATH was published
        (tmp_path / "single" / "algebra" / f"{i}.json").write_text(json.dumps(row, indent=1))
    (tmp_path / "single" / ".cache.json").write_text("not data")
    (tmp_path / "single" / "algebra" / ".index.json").write_text("not data")
    saved = datasets.Dataset.from_list(rows)
    saved.to_parquet(tmp_path / "a.parquet")
    saved.to_csv(tmp_path / "a.csv")
    saved.save_to_disk(tmp_path / "saved")
    specs = [
        lines(tmp_path / "a.jsonl", rows),
        *(str(tmp_path / name) for name in ("shards", "single", "a.parquet", "a.csv", "saved")),
    ]
    expected = load_questions(specs[0])
    for spec in specs:
        found = load_questions(spec)
        assert [(q.question, q.answer, q.verify_type, q.row) for q in found] == [
            (q.question, q.answer, q.verify_type, q.row) for q in expected
        ], spec
        assert fingerprint(found) == fingerprint(expected)
    places = {spec: load_questions(spec)[3].place for spec in specs}
    assert [places[spec] for spec in specs] == [
        "a.jsonl row 4", "part-1.jsonl row 2", "algebra/3.json row 1", "a.parquet row 4", "a.csv row 4", "saved row 4"
    ]  # fmt: skip


def test_a_format_saved_with_the_data_does_not_change_its_values(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [ROW | {"answer": 14, "numbers": [7, 2]}]
    datasets.Dataset.from_list(rows).with_format("numpy").save_to_disk(tmp_path / "saved")
    (q,) = load_questions(str(tmp_path / "saved"))
    assert q.answer == "14" and q.row == rows[0] and type(q.row["answer"]) is int


def test_a_saved_dictionary_of_splits_is_refused_with_their_folders(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list([ROW])
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "d")
    message = refusal(load_questions, str(tmp_path / "d"))
    assert str(tmp_path / "d" / "train") in message and str(tmp_path / "d" / "test") in message
    assert load_questions(str(tmp_path / "d" / "test"))[0].question == ROW["question"]


@pytest.mark.parametrize(
    "names", [("train.jsonl", "test.jsonl"), ("a-train-0.jsonl", "dev/x.jsonl"), ("val.json", "test.json")]
)
def test_a_folder_that_mixes_splits_is_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lines(tmp_path / name, [ROW])
    assert "give one file, or a folder of one split" in refusal(load_questions, str(tmp_path))


def test_a_folder_of_one_split_and_a_folder_without_data(tmp_path):
    lines(tmp_path / "train-00000-of-00002.jsonl", [ROW])
    lines(tmp_path / "train-00001-of-00002.jsonl", [ROW])
    (tmp_path / "README.md").write_text("testing")
    assert len(load_questions(str(tmp_path))) == 2
    (tmp_path / "empty").mkdir()
    assert "has no file that ends in .jsonl" in refusal(load_questions, str(tmp_path / "empty"))


@pytest.mark.parametrize(
    "spec, called",
    [
        ("openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("openai/gsm8k:main", ("openai/gsm8k", "main", "train")),
        ("openai/gsm8k:main:test", ("openai/gsm8k", "main", "test")),
        ("openai/gsm8k::test", ("openai/gsm8k", None, "test")),
        ("a.b/c-d:x.y:train", ("a.b/c-d", "x.y", "train")),
    ],
)
def test_hub_names_carry_config_and_split(monkeypatch, spec, called):
    datasets = pytest.importorskip("datasets")
    seen = []

    def load_dataset(name, config, split):
        seen.append((name, config, split))
        return datasets.Dataset.from_list([ROW, ROW])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [q.place for q in load_questions(spec)] == [f"{spec} row 1", f"{spec} row 2"]
    assert seen == [called]


def test_a_hub_name_that_cannot_be_loaded_names_both_readings(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = refusal(load_questions, "data/math:x:test")
    assert (
        "no file or folder 'data/math:x:test'" in message
        and "config x, split test" in message
        and "no route" in message
    )


@pytest.mark.parametrize(
    "spec", ["data/missing.jsonl", "/no/such/folder", "./data/x", "word", "a/b/c", "../a", "a/b:c:d:e", ""]
)
def test_a_path_that_is_not_there_never_reaches_the_hub(monkeypatch, spec):
    monkeypatch.chdir(DATA)
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: pytest.fail("asked the hub"))
    assert "There is no data at" in refusal(load_questions, spec)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.jsonl", "", "has no rows"),
        ("a.csv", "", "has no rows"),
        ("a.csv", "question,answer,verify_type\n", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.txt", "What?", "its name has to end in .jsonl"),
        ("a.csv", "question,answer,answer\nx,1,2\n", "two columns of the same name"),
        ("a.csv", 'question,answer,verify_type\nx,1,EXACT\nSo, why?,2,EXACT\n', "row 2 has 4 cells where"),
        ("a.csv", 'question,answer,verify_type\nx,1,EXACT\ny,2\n', "a.csv row 2 has 2 cells where the header has 3"),
        ("a.csv", 'question,answer,verify_type\n"x,1,EXACT\ny,2,EXACT\n', "is not valid CSV"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_refused(tmp_path, name, text, message):
    assert message in refusal(load_questions, text_file(tmp_path / name, text))


def test_text_that_is_not_utf8_is_refused_and_long_cells_are_read(tmp_path):
    (tmp_path / "a.csv").write_bytes("question,answer,verify_type\ncafé,1,EXACT\n".encode("latin-1"))
    assert "a.csv is not UTF-8 text (see byte 31)" in refusal(load_questions, str(tmp_path / "a.csv"))
    path = text_file(tmp_path / "b.csv", f"question,answer,verify_type\n{'long ' * 100_000},1,EXACT\n")
    assert len(load_questions(path)[0].question) == 500_000


@pytest.mark.parametrize("odd", ["\u2028", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_unusual_line_separators_do_not_cut_rows(tmp_path, odd):
    rows = [ROW | {"question": f"one{odd}two"}, ROW]
    assert load_questions(lines(tmp_path / "a.jsonl", rows, ensure_ascii=False))[0].question == f"one{odd}two"
    path = text_file(tmp_path / "a.csv", f"question,answer,verify_type\none{odd}two,1,EXACT\n")
    assert load_questions(path)[0].question == f"one{odd}two"


def test_built_in_tasks_need_no_mapping_and_keep_their_own_type():
    columns = {"question": "problem", "answer": "solution"}
    questions = load_questions("task:multiplication?n=3&seed=1", columns=columns, verify_type="MATH")
    assert {q.verify_type for q in questions} == {"LAST_NUMBER"}
    assert [q.place for q in questions][2] == "task:multiplication?n=3&seed=1 row 3"


def test_importing_tasks_loads_nothing_heavy():
    code = (
        "import sys, tasks; print(sorted({'torch', 'datasets', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# ------------------------------------------------------------------------------------------------ held-out share
def question_lists():
    text = st.sampled_from(["a", "b", "c d", " c  d\n", "e\u0301", "\u00e9", "f", "g"])
    messages = text.map(lambda content: [{"role": "user", "content": content}])
    return st.lists(text | messages, min_size=2, max_size=30)


def same_key(question):
    content = question if isinstance(question, str) else question[0]["content"]
    return " ".join(content.replace("e\u0301", "\u00e9").split())


@settings(deadline=None, max_examples=300)
@given(question_lists(), st.floats(0.01, 0.99), st.integers(0, 5))
def test_hold_out_never_overlaps_even_when_questions_repeat(contents, share, seed):
    questions = asked(*contents)
    try:
        train, held_out = hold_out(questions, share, seed)
    except ValueError as error:
        assert "leaves none to train on" in str(error)
        assert share * len(questions) > len(questions) - max(map(len, grouped(questions).values())) - 1
        return
    assert not {same_key(q.question) for q in train} & {same_key(q.question) for q in held_out}
    assert train and held_out
    places = [q.place for q in questions]
    assert sorted(train + held_out, key=lambda q: places.index(q.place)) == questions
    assert [q.place for q in train] == [place for place in places if place in {q.place for q in train}]
    wanted, largest = max(1, round(share * len(questions))), max(map(len, grouped(questions).values()))
    assert wanted <= len(held_out) < wanted + largest


def grouped(questions):
    groups = {}
    for q in questions:
        groups.setdefault(same_key(q.question), []).append(q)
    return groups


def test_hold_out_counts_seed_and_order():
    questions = asked(*(f"What is {i}?" for i in range(200)))
    train, held_out = hold_out(questions, 0.1, 0)
    assert (len(train), len(held_out)) == (180, 20)
    shuffled = random.Random(1).sample(questions, 200)
    assert {q.question for q in hold_out(shuffled, 0.1, 0)[1]} == {q.question for q in held_out}
    assert {q.question for q in hold_out(questions, 0.1, 1)[1]} != {q.question for q in held_out}
    assert hold_out(questions, 0, 0) == (questions, [])
    assert len(hold_out(questions[:3], 0.01, 0)[1]) == 1


@pytest.mark.parametrize("share", [1, 1.5, -0.1, float("nan")])
def test_hold_out_refuses_a_share_outside_0_to_1(share):
    assert "The held-out share is" in refusal(hold_out, asked("a", "b"), share, 0)


def test_hold_out_refuses_to_leave_nothing_to_train_on():
    assert "leaves none to train on" in refusal(hold_out, asked("a", "a ", "a"), 0.1, 0)
    assert "leaves none to train on" in refusal(hold_out, asked("a"), 0.1, 0)


# ------------------------------------------------------------------------------------------------ fingerprint
def test_F16_fingerprint_changes_with_content_and_order_only():
    rows = [ROW | {"question": f"What is {i}?", "given": [i]} for i in range(4)]

    def load(rows):
        return [Question(r["question"], r["answer"], r["verify_type"], r, "anywhere") for r in rows]

    first = fingerprint(load(rows))
    assert len(first) == 16 and int(first, 16) >= 0
    changed = [rows[::-1], rows[:3], rows + rows[:1], rows[:3] + [rows[3] | {"given": [9]}]]
    changed += [[rows[0] | {key: "x"}] + rows[1:] for key in ("question", "answer", "verify_type")]
    prints = [fingerprint(load(other)) for other in changed]
    assert len({first, *prints}) == len(changed) + 1
    questions = load(rows)
    for q in questions:
        q.place, q.gold = "elsewhere", 14
    render_prompts(questions, byte_tokenizer(CHAT), system_prompt="Think.")
    assert fingerprint(questions) == first


def test_F16_fingerprint_is_the_same_in_every_process(tmp_path):
    code = (
        "import tasks, datetime; from decimal import Decimal; "
        "row = {'a': {'x', 'y', 'z'}, 'b': object(), 'c': Decimal('1.5'), 'd': datetime.date(2024, 1, 2), 'e': b'x'}; "
        "print(tasks.fingerprint([tasks.Question('q', '1', 'EXACT', row, 'p')]))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and len(runs[0]) == 17


# ------------------------------------------------------------------------------------------------ prompts
def test_G10_without_a_chat_template_the_prompt_is_the_question_and_a_newline():
    tokenizer = byte_tokenizer(adds="")
    (q,), dropped = render_prompts(asked("What is 7 * 2?"), tokenizer)
    assert q.prompt_text == "What is 7 * 2?\n" and dropped == 0
    assert tokenizer.decode(q.prompt_ids) == "What is 7 * 2?\n"
    assert "no chat template" in chat_template_note(tokenizer)
    assert chat_template_note(byte_tokenizer(CHAT)) is None


def test_G10_a_prompt_template_without_a_chat_template_is_the_whole_prompt():
    few_shot = "3 + 4 = 7\n{question} ="
    (q,), _ = render_prompts(asked("{question} 7 * 2"), byte_tokenizer(), prompt_template=few_shot)
    assert q.prompt_text == "3 + 4 = 7\n{question} 7 * 2 ="
    (q,), _ = render_prompts(asked("7 * 2"), byte_tokenizer(), prompt_template=few_shot, system_prompt="Count.")
    assert q.prompt_text == "Count.\n3 + 4 = 7\n7 * 2 ="


def test_G11_the_templates_own_system_text_stays_and_a_system_prompt_replaces_it():
    (q,), _ = render_prompts(asked("What is 7 * 2?"), byte_tokenizer(CHAT))
    assert q.prompt_text == "<s><|turn|>system\nBe brief.<|end|><|turn|>user\nWhat is 7 * 2?<|end|><|turn|>assistant\n"
    (q,), _ = render_prompts(
        asked("7 * 2"), byte_tokenizer(CHAT), system_prompt="Think.", prompt_template="Q: {question}\nA:"
    )
    assert q.prompt_text == "<s><|turn|>system\nThink.<|end|><|turn|>user\nQ: 7 * 2\nA:<|end|><|turn|>assistant\n"


@pytest.mark.parametrize("adds", ["", "bos", "both", "eos"])
def test_D13_G11_ids_are_those_of_the_chat_template_with_one_bos(adds):
    tokenizer = byte_tokenizer(CHAT, adds)
    (q,), _ = render_prompts(asked("What is 7 * 2?"), tokenizer)
    assert q.prompt_ids.count(tokenizer.bos_token_id) == 1 and q.prompt_ids[0] == tokenizer.bos_token_id
    messages = [{"role": "user", "content": "What is 7 * 2?"}]
    served = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert q.prompt_ids == served["input_ids"]
    assert tokenizer.eos_token_id not in q.prompt_ids


def test_D13_a_chat_template_without_bos_gets_none():
    tokenizer = byte_tokenizer(CHAT.replace("{{ bos_token }}", ""))
    (q,), _ = render_prompts(asked("What is 7 * 2?"), tokenizer)
    assert tokenizer.bos_token_id not in q.prompt_ids


@pytest.mark.parametrize("adds, count", [("", 0), ("bos", 1), ("both", 1), ("eos", 0)])
def test_T44_plain_prompts_have_the_tokenizers_bos_once_and_no_eos(adds, count):
    tokenizer = byte_tokenizer(adds=adds)
    for question in ("What is 7 * 2?", "<s>What is 7 * 2?"):
        (q,), _ = render_prompts(asked(question), tokenizer)
        literal = question.startswith("<s>")
        assert q.prompt_ids.count(tokenizer.bos_token_id) == (1 if literal else count)
        assert (q.prompt_ids[0] == tokenizer.bos_token_id) == (literal or count == 1)
        assert tokenizer.eos_token_id not in q.prompt_ids


def test_G14_text_and_messages_render_alike():
    tokenizer = byte_tokenizer(CHAT)
    messages = [{"role": "user", "content": "What is 7 * 2?"}]
    for text, listed in [
        render_prompts(asked("What is 7 * 2?", messages), t)[0] for t in (tokenizer, byte_tokenizer())
    ]:
        assert text.prompt_ids == listed.prompt_ids and text.prompt_text == listed.prompt_text
        assert "role" not in listed.prompt_text and "[" not in listed.prompt_text
    assert messages == [{"role": "user", "content": "What is 7 * 2?"}]


def test_G14_conversations_keep_their_turns_and_their_own_system_message():
    turns = [("system", "Count."), ("user", "2 * 2"), ("assistant", "4"), ("user", "7 * 2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    options = dict(system_prompt="Ignored.", prompt_template="{question} =")
    (q,), _ = render_prompts(asked(messages), byte_tokenizer(CHAT), **options)
    body = "".join(f"<|turn|>{role}\n{content}<|end|>" for role, content in turns[:3])
    assert q.prompt_text == f"<s>{body}<|turn|>user\n7 * 2 =<|end|><|turn|>assistant\n"
    assert q.question == messages and messages[-1]["content"] == "7 * 2"
    (q,), _ = render_prompts(asked(messages), byte_tokenizer())
    assert q.prompt_text == "Count.\n2 * 2\n4\n7 * 2\n"


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_G14_messages_load_from_every_kind_of_file(tmp_path, ending):
    datasets = pytest.importorskip("datasets")
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "What is 7 * 2?"}]
    path = str(tmp_path / f"a{ending}")
    if ending == ".jsonl":
        lines(Path(path), [ROW, ROW | {"question": messages + []}])
        assert load_questions(path)[0].question == ROW["question"]
    elif ending == ".csv":
        text = json.dumps(messages).replace('"', '""')
        text_file(Path(path), f'question,answer,verify_type\nwhy?,1,EXACT\n"{text}",14,LAST_NUMBER\n')
    else:
        other = [{"role": "user", "content": "x", "name": "someone"}]
        datasets.Dataset.from_list([ROW | {"question": other}, ROW | {"question": messages}]).to_parquet(path)
    assert load_questions(path)[1].question == messages


@pytest.mark.parametrize(
    "question, message",
    [
        (str([{"role": "user", "content": "What's 7 * 2?"}]), "has the printed form of a message list"),
        ([], "ask the model nothing"),
        ([{"role": "user", "content": "  "}], "ask the model nothing"),
        ([{"role": "system", "content": "Count."}], "ask the model nothing"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "ask the model nothing"),
        ([{"role": "user"}], "lacks a role or a content"),
        ([{"content": "x"}], "lacks a role or a content"),
        (["What is 7 * 2?"], "lacks a role or a content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "lacks a role or a content"),
        ({"role": "user", "content": "x"}, "has a dict as its question"),
        (14, "has a int as its question"),
    ],
)
def test_G14_messages_that_cannot_be_asked_are_refused_at_load(tmp_path, question, message):
    path = lines(tmp_path / "a.jsonl", [ROW, ROW | {"question": question}])
    assert refusal(load_questions, path).startswith("a.jsonl row 2 ") and message in refusal(load_questions, path)


def test_a_question_that_only_begins_like_a_list_stays_text(tmp_path):
    texts = ["[1, 2, 3] sums to?", '[{"a": 1}]', "[x] or [y]?"]
    path = lines(tmp_path / "a.jsonl", [ROW | {"question": text} for text in texts])
    assert [q.question for q in load_questions(path)] == texts


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ bos_token }}<|turn|>user\n<|end|><|turn|>assistant\n", "without its user message"),
        ("{{ bos_token }}{{ prompt }}", "without its user message"),
        ("{{ messages[0].content | upper }}", "without its user message"),
        (
            "{{ raise_exception('only users may speak') }}",
            "cannot be rendered by the tokenizer's chat template: only users",
        ),
        ("{{ messages[9].content }}", "cannot be rendered by the tokenizer's chat template"),
    ],
)
def test_G13_a_prompt_without_the_questions_text_is_refused(template, message):
    refused = refusal(render_prompts, asked("What is 7 * 2?"), byte_tokenizer(template))
    assert refused.startswith("q.jsonl row 1 ") and message in refused


def test_G13_a_template_that_drops_the_system_prompt_is_refused():
    only_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"
    assert render_prompts(asked("x?"), byte_tokenizer(only_users))[0][0].prompt_text == "x?\n"
    message = refusal(render_prompts, asked("x?"), byte_tokenizer(only_users), system_prompt="Think first.")
    assert "without its system message" in message and "'Think first.'" in message


def test_G13_prompt_template_without_a_place_for_the_question_is_refused():
    assert "lacks {question}" in refusal(
        render_prompts, asked("x"), byte_tokenizer(), prompt_template="Solve {problem}"
    )


def test_G13_a_tokenizer_that_knows_nothing_of_the_text_is_refused():
    model = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    assert "gives a prompt without tokens" in refusal(render_prompts, asked("xyz"), tokenizer)


@pytest.mark.parametrize("text", ["<|end|><|turn|>assistant\n14", "x</s>", "<s>y"])
def test_special_tokens_in_a_question_are_refused_under_a_chat_template(text):
    message = refusal(render_prompts, asked("fine", [{"role": "user", "content": text}]), byte_tokenizer(CHAT))
    assert message.startswith("q.jsonl row 2 holds ") and "special token" in message


def test_prompts_over_the_limit_are_counted_on_final_ids():
    questions = ["a" * 10, "b" * 11, "c" * 12]
    tokenizer = byte_tokenizer()  # with <s> before and the newline after: 12, 13 and 14 ids
    kept, dropped = render_prompts(asked(*questions), tokenizer, max_prompt_tokens=13, too_long="drop")
    assert ([q.question[0] for q in kept], dropped) == (["a", "b"], 1)
    message = refusal(render_prompts, asked(*questions), tokenizer, max_prompt_tokens=12)
    assert message.startswith("2 of 3 prompts exceed the limit of 12 tokens, first q.jsonl row 2 with 13")
    assert render_prompts(asked(*questions), tokenizer, max_prompt_tokens=14)[1] == 0
    message = refusal(render_prompts, asked(*questions), tokenizer, max_prompt_tokens=11, too_long="drop")
    assert message.startswith("3 of 3 prompts exceed")
    assert "too_long is 'cut'" in refusal(render_prompts, asked("a"), tokenizer, too_long="cut")


def test_rendering_again_gives_the_same_and_nothing_gives_nothing():
    tokenizer = byte_tokenizer(CHAT)
    questions = asked("one", "two")
    first = [list(q.prompt_ids) for q in render_prompts(questions, tokenizer, prompt_template="{question}?")[0]]
    assert [q.prompt_ids for q in render_prompts(questions, tokenizer, prompt_template="{question}?")[0]] == first
    assert render_prompts([], tokenizer) == ([], 0)


# ------------------------------------------------------------------------------------------------ the command
def test_the_command_writes_what_loading_the_task_gives(tmp_path, capsys):
    path = tmp_path / "tasks.jsonl"
    subprocess.run([sys.executable, "tasks.py", "scheduling", "--n", "50", "--out", path], cwd=ROOT, check=True)
    assert fingerprint(load_questions(path)) == fingerprint(load_questions("task:scheduling?n=50&seed=0"))
    tasks.main(["countdown?min_numbers=3&max_numbers=3", "--n", "4", "--seed", "2"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(row["numbers"]) for row in rows] == [3] * 4


def test_the_command_refuses_in_one_line(capsys):
    with pytest.raises(SystemExit):
        tasks.main(["juggling"])
    assert "There is no built-in task 'juggling'" in capsys.readouterr().err
