// peak_memory TRAIN_GPT-OPTION...
// Two training steps of a model on the CPU. Each rank prints "bytes PLANNED PEAK". PLANNED is the plan's
// memory. PEAK is the growth of the process's resident memory after the steps of a small model, which start
// MPI, threads and oneDNN.

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/launcher.h"
#include "llmc/data/data.h"
#include "llmc/device/device.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/options.h"
#include "llmc/train/trainer.h"

namespace llmc {
namespace {

// The bytes of a row of /proc/self/status that is in kB: VmRSS, or VmHWM (the peak of VmRSS).
std::int64_t resident(const std::string& row) {
    std::ifstream file("/proc/self/status");
    std::string line;
    while (std::getline(file, line)) {
        if (line.starts_with(row + ":")) return 1024 * std::stoll(line.substr(row.size() + 1));
    }
    programming_error("no " + row + " in /proc/self/status");
}

// Resets VmHWM to the current value.
void forget_the_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

// Returns the plan's bytes.
std::size_t train(const Options& options, Job& job, Device& device, int steps) {
    HostCommunicator& world = job.world();
    const Mesh mesh = options.mesh(world.size(), world.rank());
    const RunPlan plan = plan_run({.model = options.make_model(),
                                   .dtype = options.compute_dtype(),
                                   .gradient_dtype = options.kept_gradient_dtype(),
                                   .mesh = mesh,
                                   .recompute = options.recomputation(),
                                   .global_batch_tokens = *options.global_batch_tokens,
                                   .micro_batch_sequences = options.micro_batch_size.value_or(0)},
                                  device.sizes(), HostCommunicator::staging_bytes(world.size()));
    const Data data = open_data({.train_data = options.train_data,
                                 .val_data = options.val_data,
                                 .vocabulary = options.vocabulary(),
                                 .sequence_length = options.sequence_length()});
    const MeshGroups groups(world, mesh, plan.parts);
    Trainer trainer(options, plan, device, world, groups, false, options.nvme_dir);
    world.set_staging(trainer.arenas()[plan.communication]);
    const TrainingSamples samples(*data.training, plan.spec.model.sequence_length, options.seed);
    TrainingBatches batches(samples, plan.share(), plan.spec.model.sequence_length);
    for (int step = 0; step < steps; ++step) trainer.train_step(batches);
    world.set_staging({});
    return plan.memory.total_bytes();
}

void run(const Options& options, Job& job) {
    const std::unique_ptr<Device> device = make_cpu_device(job.cores());
    Options small = options;
    for (const auto& [name, size] :
         {std::pair{"layers", 2}, {"heads", 2}, {"channels", 64}, {"vocab-size", 256}})
        small.model_options.find(name)->second = std::optional<std::int64_t>(size);
    train(small, job, *device, 2);
    forget_the_peak();
    const std::int64_t before = resident("VmRSS");
    const std::size_t planned = train(options, job, *device, 2);
    fmt::print("bytes {} {}\n", planned, resident("VmHWM") - before);
    std::fflush(stdout);
    job.world().barrier();
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
    if (const auto status = llmc::launch_processes(argc, argv)) return *status;
    llmc::accept_stop_signals();  // ends this program, which does not handle it
    llmc::let_waiting_threads_sleep(argv);
    llmc::Job job;
    try {
        std::string text;
        if (auto options = llmc::parse_options(argc, argv, text)) {
            llmc::run(for_device(*options, llmc::DeviceKind::cpu), job);
        }
    } catch (const std::exception& fault) {
        job.fail(fault.what());
    }
}
