// bench_step THREADS TRAIN_GPT-OPTION...
//
// A training run that takes a step on request, so that a script can alternate between several programs. It
// reads a command per line from standard input, and answers each with a line of JSON.
//   ceilings   {"flops": {"fp32": ..., "bf16": ...}, "bytes": ...} per second
//   reads      {"bytes": ...} per second that only reading gets from memory
//   host       {"us": ...}: the host's time for each operation of a step, measured with operations that do nothing
//   step       {"ms": ..., "loss": ..., "operations": {"add": {"calls", "ms", "flops", "bytes", "dtype"}, ...}}
// The first line it prints describes the run.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "dev/cpu/ceilings.h"
#include "dev/cpu/timed_ops.h"
#include "llmc/comm/bootstrap.h"
#include "llmc/data/data.h"
#include "llmc/data/samples.h"
#include "llmc/data/training_batches.h"
#include "llmc/device/counting_ops.h"
#include "llmc/device/device.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/options.h"
#include "llmc/train/trainer.h"

namespace {

using namespace llmc;
using Json = nlohmann::ordered_json;

Json to_json(const bench::WorkByOperation& work) {
    Json json;
    for (const auto& [name, w] : work) {
        json[name] = {{"calls", w.calls},
                      {"ms", 1e3 * w.seconds},
                      {"flops", w.flops},
                      {"bytes", w.bytes},
                      {"dtype", name_of(w.dtype)}};
    }
    return json;
}

void say(const Json& json) {
    fmt::print("{}\n", json.dump());
    std::fflush(stdout);
}

// The host's microseconds per operation of a real step. It is the shortest of some steps with operations that
// do nothing, divided by the number of operations.
double host_microseconds(const Options& options, const RunPlan& plan, Device& device, HostCommunicator& world,
                         const MeshGroups& groups, TrainingBatches& batches, std::int64_t operations) {
    constexpr int steps = 20;
    bench::DeviceWithOps idle(device, std::make_unique<IdleOps>());
    Trainer trainer(options, plan, idle, world, groups);
    double least = std::numeric_limits<double>::max();
    for (int step = 0; step < steps; ++step) least = std::min(least, trainer.train_step(batches).step_ms);
    return 1e3 * least / static_cast<double>(operations);
}

void run(int threads, const Options& options, HostCommunicator& world) {
    const std::unique_ptr<Device> device = make_cpu_device(threads);
    bench::TimedDevice timed(*device);
    const RunPlan plan = plan_run({.model = options.make_model(),
                                   .dtype = options.compute_dtype(),
                                   .gradient_dtype = options.kept_gradient_dtype(),
                                   .mesh = {},
                                   .recompute = options.recomputation(),
                                   .global_batch_tokens = *options.global_batch_tokens,
                                   .micro_batch_sequences = options.micro_batch_size.value_or(0),
                                   .default_micro_batch_tokens = device->sizes().default_micro_batch_tokens(),
                                   .logits_bytes = device->sizes().default_logits_bytes()},
                                  device->sizes(), HostCommunicator::staging_bytes(1));
    const Data data = open_data({.train_data = options.train_data,
                                 .val_data = options.val_data,
                                 .vocabulary = options.vocabulary(),
                                 .sequence_length = options.sequence_length()});
    const MeshGroups groups(world, plan.spec.mesh, plan.parts);
    Trainer trainer(options, plan, timed, world, groups);
    const TrainingSamples samples(*data.training, plan.spec.model.sequence_length, options.seed);
    TrainingBatches batches(samples, plan.share(), plan.spec.model.sequence_length);
    say({{"device", device->description()},
         {"note", device->note(plan.spec.dtype)},
         {"parameters", count_parameters(plan.spec.model)},
         {"tokens", plan.spec.global_batch_tokens},
         {"memory", plan.memory.total_bytes()}});

    for (std::string command; std::getline(std::cin, command);) {
        if (command == "ceilings") {
            say({{"flops",
                  {{"fp32", bench::product_ceiling(DType::fp32, threads)},
                   {"bf16", bench::product_ceiling(DType::bf16, threads)}}},
                 {"bytes", bench::memory_ceiling(threads)}});
        } else if (command == "reads") {
            say({{"bytes", bench::read_ceiling(threads)}});
        } else if (command == "host") {
            timed.take_work();
            trainer.train_step(batches);
            std::int64_t operations = 0;
            for (const auto& [_, work] : timed.take_work()) operations += work.calls;
            say({{"us", host_microseconds(options, plan, *device, world, groups, batches, operations)}});
        } else if (command == "step") {
            timed.take_work();
            const StepMetrics metrics = trainer.train_step(batches);
            say({{"ms", metrics.step_ms},
                 {"loss", metrics.loss},
                 {"operations", to_json(timed.take_work())}});
        } else {
            user_error("bench_step knows no command '{}'; give ceilings, reads, host or step", command);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    let_waiting_threads_sleep(argv);
    Job job;
    try {
        if (argc < 2) user_error("usage: bench_step THREADS TRAIN_GPT-OPTION...");
        std::string text;
        if (const auto options = parse_options(argc - 1, argv + 1, text)) {
            run(std::stoi(argv[1]), *options, job.world());
        } else {
            fmt::print("{}", text);
        }
    } catch (const std::exception& fault) {
        job.fail(fault.what());
    }
}
