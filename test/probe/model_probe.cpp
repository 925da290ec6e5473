// model_probe WEIGHTS.safetensors HEADS DTYPE MICRO_BATCH TOKENS.safetensors GRADIENTS.safetensors
//
// Runs a whole model forward and backward on the CPU device, so that a script can compare it with another
// implementation: prints the mean loss and the squared norm of the gradient, and writes the gradients in the
// names and shapes of the weights.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

#include "test/probe/run_model.h"

namespace {

using namespace llmc;

void run(char** argv) {
    const std::string dtype = argv[3];
    const SafetensorsReader batch(argv[5]);
    probe::Model model(argv[1], std::stoi(argv[2]), dtype == "bf16" ? DType::bf16 : DType::fp32,
                       batch.entry("tokens").shape[0], std::stoi(argv[4]));
    const double loss = model.step(probe::read_tokens(batch), false);
    model.save_gradients(argv[6]);
    fmt::print("{:.17g} {:.17g}\n", loss, model.norm_squared());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) {
        fmt::print(stderr,
                   "usage: model_probe WEIGHTS.safetensors HEADS DTYPE MICRO_BATCH TOKENS.safetensors "
                   "GRADIENTS.safetensors\n");
        return 1;
    }
    try {
        run(argv);
    } catch (const std::exception& error) {
        fmt::print(stderr, "error: {}\n", error.what());
        return 1;
    }
}
