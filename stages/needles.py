"""The stage `needles`: hide sentences in long prompts, and ask BF16 and FP8 for them."""

from ..calibrate.model.tokenizer import load_tokenizer
from ..core.errors import InputError
from ..core.files import write_document
from ..core.run import Run
from ..options import ValidateOptions
from ..quantize.scales.decisions import load_scales
from ..quantize.scales.scheme import in_two_codes
from ..validate.accuracy.adder_cost import with_sums
from ..validate.needles.document import NeedleScores, load_needles
from ..validate.needles.prompts import Haystack, Needle, digest_of, make_needles, read_haystack
from ..validate.needles.scoring import ask_reference, find, needle_runtimes, sums_cost
from .corpus import load_tokens, opening_of
from .other_text import positions
from .pipeline.stage import CALIBRATE_MODULES, Key, Notes, device, needs, note_other_arithmetic
from .pipeline.stages import CORPUS, NEEDLES, NeedleFacts
from .shared.model_files import fp8_files
from .shared.sources import source_of


def ask_needles(run: Run, notes: Notes, options: ValidateOptions) -> NeedleScores:
    """Ask BF16 and FP8 of `run` for the needles of `options`, unless that is done, and write `needles.json`.

    Raises InputError for a length beyond the model's positions, or beyond the text.
    """
    needs("calibrate", CALIBRATE_MODULES)
    inputs = fp8_files(run, graph=False)
    source = source_of(run)
    haystack, needles = needle_prompts(run, options)
    inputs |= {"model": source.fingerprint, "prompts": digest_of(needles)}
    key = Key(inputs, NEEDLES.options(), NeedleFacts(accumulator=options.accumulator))
    if not NEEDLES.is_current(run, key):
        note_other_arithmetic(run, notes)
        scales = load_scales(run)
        sums = {}
        runtimes = needle_runtimes(run, source, device(), bool(in_two_codes(scales.forms)), bool(scales.kv_cache))
        notes.note(
            f"--needles: {len(needles)} prompts, {sum(len(needle.ids) for needle in needles):,} tokens in all, are "
            f"read by each of {', '.join(runtimes)}"
        )
        if options.accumulator:
            sums = with_sums(run, options.accumulator, device(), ask_reference)
            notes.note(
                sums_cost(run, [needle for needle in needles if needle.trial == 0], options.accumulator, device())
            )
        with NEEDLES.writing(run, key, notes) as log:
            answers = find(needles, runtimes, sums, notes)
            document = NeedleScores(text=haystack.name, sentence=haystack.sentence, needles=answers)
            write_document(run.needles, document)
            log.outputs.append(run.needles)
    return load_needles(run)


def needle_prompts(run: Run, options: ValidateOptions) -> tuple[Haystack, list[Needle]]:
    """The text and the needles of `options`; raises InputError as `ask_needles` does."""
    lengths = options.needles or ()
    limit = positions(run)
    if limit is not None and (beyond := [length for length in lengths if length > limit]):
        raise InputError(
            f"--needles {beyond[0]}", f"is more than the model's positions, {limit}", f"give at most {limit}"
        )
    tokenizer = load_tokenizer(source_of(run))
    prefix = tuple(opening_of(run).prefix)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    if options.needle_text is not None:
        haystack = read_haystack(options.needle_text, encode, prefix)
    else:
        haystack = Haystack(run.facts(CORPUS).eval_data, load_tokens(run, run.evaluation), prefix=prefix)
    return haystack, make_needles(haystack, lengths, options.needle_trials, encode)
