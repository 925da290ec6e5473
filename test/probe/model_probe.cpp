// model_probe WEIGHTS.safetensors HEADS DTYPE MICRO_BATCH TOKENS.safetensors GRADIENTS.safetensors [cpu|cuda]
//
// Runs a whole model forward and backward on a device (default: the CPU), so that a script can compare it
// with another implementation. Prints the mean loss and the squared norm of the gradient. Writes the
// gradients with the names and shapes of the weights.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/device/cuda/gpus.h"
#include "test/probe/run_model.h"

namespace {

using namespace llmc;

std::unique_ptr<Device> open(std::string_view name) {
    if (name == "cpu") return make_cpu_device();
    if (name != "cuda") user_error("there is no device {}; there are cpu and cuda", name);
    const Gpus gpus = find_gpus();
    if (gpus.all.empty()) user_error("{}", gpus.why_none);
    return make_cuda_device({});
}

void run(char** argv, std::string_view device) {
    const std::string dtype = argv[3];
    const SafetensorsReader batch(argv[5]);
    probe::Model model(argv[1], std::stoi(argv[2]), dtype == "bf16" ? DType::bf16 : DType::fp32,
                       batch.entry("tokens").shape[0], std::stoi(argv[4]), 0, DType::fp32, open(device));
    const double loss = model.step(probe::read_tokens(batch), false);
    model.save_gradients(argv[6]);
    fmt::print("{:.17g} {:.17g}\n", loss, model.norm_squared());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7 && argc != 8) {
        fmt::print(stderr,
                   "usage: model_probe WEIGHTS.safetensors HEADS DTYPE MICRO_BATCH TOKENS.safetensors "
                   "GRADIENTS.safetensors [cpu|cuda]\n");
        return 1;
    }
    try {
        run(argv, argc == 8 ? argv[7] : "cpu");
    } catch (const std::exception& error) {
        fmt::print(stderr, "error: {}\n", error.what());
        return 1;
    }
}
