// --generate: the program as a writer. It continues the prompt with weights that it is given, and does nothing else: no
// data is opened, no file is written. The text alone goes to standard output, token by token; what else there is to say
// goes to standard error, a line before it and one behind; all of it to standard output where scripts/launch.sh says that
// both end in one place, to which it leads them by ways of their own: one would overtake the other.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/data/tokenizer.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/options.h"
#include "llmc/train/stop.h"
#include "llmc/train/trainer.h"

namespace llmc {

// What follows from --generate: the checkpoint's model, where its sizes were not given; nothing to train, and nothing kept
// for a backward pass but keys and values. UserError without weights, without such a checkpoint, and for options that ask for more than text.
void settle_generation(Options& options);
// The same, once the mesh is known: the smallest batch there is.
void settle_batch_of_generation(Options& options, const Mesh& mesh);

// A line beside the text.
void say_beside_text(std::string_view line);

struct Generation {
    const Options& options;
    const RunPlan& plan;
    std::vector<std::int32_t> prompt;
    TextStream text;      // of the tokens
    std::string weights;  // where these are from, for people
};

// Writes the prompt and its continuation, until it is asked to stop or nobody reads on; all ranks call it. UserError where
// standard output takes no more for another reason.
void generate_text(Generation& generation, Trainer& trainer, Communicator& world, const StopSignals& signals);

}  // namespace llmc
