// model_probe WEIGHTS.safetensors TOKENS.safetensors GRADIENTS.safetensors --device cpu|cuda [OPTION...]
//
// Runs a whole model forward and backward on a device, so that a script can compare it with another
// implementation. The model, the dtype and the micro-batch size are options of train_gpt. Prints the mean loss
// and the squared norm of the gradient. Writes the gradients with the names and shapes of the weights.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/device/cuda/gpus.h"
#include "llmc/train/options.h"
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

void run(int argc, char** argv) {
    std::string help;
    // The last file stands where parse_options expects the program's name.
    const std::optional<Options> options = parse_options(argc - 3, argv + 3, help);
    if (!options) user_error("the probe prints no help; ./train_gpt --help lists the options");
    const SafetensorsReader batch(argv[2]);
    const std::int64_t sequences = batch.entry("tokens").shape[0];
    probe::Model model(argv[1], options->make_model(), options->compute_dtype(), sequences,
                       options->micro_batch_size.value_or(sequences), 0, DType::fp32, open(options->device));
    if (options->has_adapters())
        model.load_adapters(std::filesystem::path(options->lora) / adapter_weights_file);
    const double loss = model.step(probe::read_tokens(batch), false);
    model.save_gradients(argv[3]);
    fmt::print("{:.17g} {:.17g}\n", loss, model.norm_squared());
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        fmt::print(stderr,
                   "usage: model_probe WEIGHTS.safetensors TOKENS.safetensors GRADIENTS.safetensors "
                   "--device cpu|cuda [OPTION...]\n");
        return 1;
    }
    try {
        run(argc, argv);
    } catch (const std::exception& error) {
        fmt::print(stderr, "error: {}\n", error.what());
        return 1;
    }
}
