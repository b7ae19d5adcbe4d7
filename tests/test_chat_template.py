"""Chat templates of strangers: whatever one does, it ends within its limits, in one sentence, and
holds up nobody else. That templates render as in transformers is in test_tokenizer.py."""

import gc
import threading
import time
from typing import Any

import pytest

from processes import descendants
from shardwise.formats.tokenizers.template_process import MAX_IDLE, TemplateProcesses
from tiny_engine import LOOP

CPU_SECONDS = 0.3
DOUBLE = (
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}"
)
SLOW = r"takes more than 0\.3 s of CPU time"
LARGE = "needs more than 256 MiB of memory"


@pytest.fixture
def processes() -> TemplateProcesses:
    return TemplateProcesses(cpu_s=CPU_SECONDS)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (LOOP, SLOW),
        ("{{ ('x' * 10000000) | wordwrap(1) }}", SLOW),
        ("{{ lipsum(n=1000000) }}", SLOW),
        (DOUBLE, LARGE),
        ("{{ '%10000000000d' % 1 }}", LARGE),
        ("{{ 'x' * 10 ** 10 }}", LARGE),
        ("{{ messages | tojson(indent=5000000000) }}", LARGE),
        ("{{ range(99999) | list * 100000 }}", LARGE),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{{ raise_exception('x' * 10000000) }}", "^.{100,600}$"),
    ],
)
def test_a_template_ends_within_its_limits(
    processes: TemplateProcesses, template: str, sentence: str
) -> None:
    start_s = time.perf_counter()
    with pytest.raises(ValueError, match=sentence):
        processes.render(template, {"messages": [{"role": "user"}]})
    assert time.perf_counter() - start_s < 20  # instead of for ever


@pytest.mark.parametrize("value", [object(), b"bytes", {1, 2}, {"a": [object()]}])
def test_messages_hold_values_of_json(processes: TemplateProcesses, value: Any) -> None:
    with pytest.raises(ValueError, match="values of JSON only"):
        processes.render("x", {"messages": [value]})


def test_looping_chats_hold_up_no_others() -> None:
    processes = TemplateProcesses(cpu_s=0.5)
    template = "{% if messages[0] == 'loop' %}" + LOOP + "{% endif %}{{ messages[0] }}"
    sentences: list[str] = []

    def loop() -> None:
        try:
            processes.render(template, {"messages": ["loop"]})
        except ValueError as error:
            sentences.append(str(error))

    loops = [threading.Thread(target=loop) for _ in range(8)]
    for thread in loops:
        thread.start()
    rendered = [processes.render(template, {"messages": [str(i)]}) for i in range(20)]
    assert rendered == [str(i) for i in range(20)]
    assert not sentences  # their 4 s of work are not done
    for thread in loops:
        thread.join()
    assert len(sentences) == 8 and all("CPU time" in each for each in sentences)
    assert processes.render(template, {"messages": ["after"]}) == "after"


def test_a_process_serves_many_chats_and_is_replaced_when_it_has_ended(
    processes: TemplateProcesses,
) -> None:
    before = descendants()
    for _ in range(3):
        assert processes.render("{{ a }}", {"a": "é\ud800\n"}) == "é\ud800\n"
        with pytest.raises(ValueError, match="does not accept these messages: no"):
            processes.render("{{ raise_exception('no') }}", {})
        assert len(descendants() - before) == 1
    processes._idle[0].kill()
    processes._idle[0].wait()
    assert processes.render("{{ a }}", {"a": 1}) == "1"


def test_few_processes_stay_and_none_when_the_tokenizer_is_gone() -> None:
    before = descendants()
    processes = TemplateProcesses()
    renders = [
        threading.Thread(target=processes.render, args=("{{ 'x' * 9999999 }}", {}))
        for _ in range(6)
    ]
    for thread in renders:
        thread.start()
    for thread in renders:
        thread.join()
    assert 1 <= len(descendants() - before) <= MAX_IDLE
    del processes, renders, thread
    gc.collect()
    assert descendants() == before
