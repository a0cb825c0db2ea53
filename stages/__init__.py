"""The stages, one file each: each reads files of the run and writes files of the run, and `api` joins them.

All that can be wrong with the input is found before the first file is written. A stage that is current (same inputs,
options and version) is passed over, so the same command goes on where it was killed, and another method chooses again
without measuring again.

In the order of work:

    corpora     `corpus`: texts to the windows that are calibrated on, and those held out
    measuring   `measure`: the float model on the windows, by one process or several ranks; and on other text
    merging     `corpus` and `measure` of runs that were measured apart
    choosing    `quantize`: scales from statistics, and the checkpoint they make
    queries     `queries`: what attention in FP8 must know besides
    graphs      `export`: both graphs beside the checkpoint, linted
    baselines   `export-bf16`, `export-int8`: the same model in the precisions FP8 is compared with
    building    `build-engine`, also of those: engines, and what is proven of them
    validating  `validate`: the held-out text through the runtimes, and the gate on what is lost
    deploying   `triton`: the model repository, and in it the plain model of an engine
    locating    `sensitivity`: the loss that each tensor causes alone
    tuning      `tune`: the cheapest mix that meets a budget of loss, and the run made anew by it
    candidates  for it: scales and codes of all that can be chosen, and what each is predicted to lose
    benching    `bench`: what answers take on a runtime, in each precision and beside other runs
    continuing  `continue`: what BF16 and FP8 write after the same words, for the report
    reporting   `report`: the run as a page and a notebook, beside other runs

Of what is there, without writing:

    opening     a run, opened: the one place that says it is none, or a part
    inspecting  `fp8q inspect`: every module, and what stands out
    examining   `fp8q doctor RUN`: the stability checklist, a verdict each
    engines     `fp8q engine`: what engines run, read from them anew
    generating  `fp8q generate`: text from its FP8 model, from the BF16 model it was made of, or from both
    serving     `fp8q serve`: its FP8 model behind OpenAI's API, and the BF16 model beside it
    linting     `fp8q lint`: an ONNX file, a Triton repository or all of a run against the rules

For all of them:

    ahead       what later stages would refuse, told before the first one writes
    texts       texts, read, held out and shared out into windows
    adapters    those beside the model, and which commands know nothing of them
    sources     the source checkpoint: its products told before any work, and found again later
    other_text  text that the run was not calibrated on, read as its own was
    resuming    what a stage has found so far, in a file
    steps       a reporter that remembers, the record of a stage, the device, the extras
"""
