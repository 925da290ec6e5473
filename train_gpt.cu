// train_gpt: trains a GPT from scratch.
//
//   make train_gpt && mpirun -np 8 ./train_gpt
//
// This file is the story, read from top to bottom: options -> mesh -> plan -> trainer -> loop. What each of
// them does is in llmc/, one folder a subject.

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/comm/bootstrap.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/data/data.h"
#include "llmc/data/samples.h"
#include "llmc/data/tokenizer.h"
#include "llmc/device/cpu/openmp_wait.h"
#include "llmc/device/device.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/files.h"
#include "llmc/io/metrics.h"
#include "llmc/io/model_files.h"
#include "llmc/io/run_identity.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/console.h"
#include "llmc/train/options.h"
#include "llmc/train/outputs.h"
#include "llmc/train/report.h"
#include "llmc/train/resume.h"
#include "llmc/train/trainer.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

// Trains to the last step, then validates, samples, saves and exports. `speaks`: this rank writes files and
// samples.
void train(const Run& run, Trainer& trainer, Console& console, bool speaks) {
    const Options& options = run.options;
    const GPTConfig& config = run.plan.spec.config;
    const TrainingSamples samples(*run.data.training, config.sequence_length, options.seed);
    std::optional<ValidationWindows> validation;
    if (run.data.validation) validation.emplace(*run.data.validation, config.sequence_length);

    std::optional<MetricsWriter> metrics;
    if (speaks) {
        // The metrics first: where they cannot be written nothing is.
        metrics.emplace(metrics_file(options, run.out_dir), run_record(run, trainer.device()),
                        trainer.progress().step);
        make_directory(run.out_dir);
        write_run_identity(run.out_dir, run.identity);
        write_file(run.out_dir / "config.toml", to_toml(options));
    }

    Outcome outcome;
    const auto validate = [&]() -> std::optional<double> {
        if (!validation) return std::nullopt;
        const std::int64_t some = options.val_batches * run.plan.global_sequences();
        const std::int64_t all = validation->windows();
        const double loss = trainer.validate(*validation, some == 0 ? all : std::min(some, all));
        outcome.see_validation(loss, trainer.progress().step);
        return loss;
    };
    const std::vector<std::int32_t> prompt = encode_prompt(options.prompt, config.vocabulary);
    const auto sample = [&] {
        if (!speaks || options.sample_tokens == 0) return;
        std::vector<std::int32_t> tokens = prompt;
        const std::vector<std::int32_t> more = trainer.generate(prompt, options.sample_tokens);
        tokens.insert(tokens.end(), more.begin(), more.end());
        console.sample(trainer.progress().step, decode(tokens, config.vocabulary));
    };
    const auto save = [&] {
        if (!speaks) return;
        trainer.require_finite();
        outcome.checkpoint = save_checkpoint(run.out_dir, run.identity, trainer.progress(), to_json(options),
                                             trainer.device(), trainer.store());
    };
    const auto due = [](std::int64_t every, std::int64_t step) { return every > 0 && step % every == 0; };

    const auto start = std::chrono::steady_clock::now();
    const std::int64_t first_step = trainer.progress().step;
    console.begin(first_step + 1, options.steps);
    while (trainer.progress().step < options.steps) {
        StepMetrics line = trainer.train_step(samples);
        const bool last = line.step == options.steps;
        if (last || due(options.val_every, line.step)) line.val_loss = validate();

        if (metrics) metrics->write(line);
        console.step(line);
        if (line.val_loss) console.validation(line.step, *line.val_loss);
        if (!last && due(options.sample_every, line.step)) sample();
        if (last || due(options.checkpoint_every, line.step)) save();
    }
    outcome.steps = trainer.progress().step - first_step;
    if (outcome.steps == 0) {
        // Nothing to train: an evaluation of the weights as they are.
        if (const auto loss = validate()) console.validation(trainer.progress().step, *loss);
    }
    sample();
    if (speaks && !options.export_file.empty()) {
        make_directory(fs::absolute(options.export_file).parent_path());
        save_weights(options.export_file, trainer.device(), trainer.store(), false);
    }
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    console.summary(summary_rows(run, outcome));
}

// Where results go: as asked, beside the checkpoint that is resumed, or a directory of its own by the time.
fs::path choose_out_dir(const Options& options) {
    if (!options.out_dir.empty()) return options.out_dir;
    if (options.resume && !options.resume->empty()) {
        // "runs/a/checkpoint-00000100/" has an empty name at its end, which is not what it lies in.
        return (fs::absolute(*options.resume) / "").lexically_normal().parent_path().parent_path();
    }
    return fs::path("runs") / fmt::format("{:%Y-%m-%d_%H-%M-%S}", fmt::localtime(std::time(nullptr)));
}

void run_program(const Options& options, MpiEnvironment& mpi) {
    MpiCommunicator& world = mpi.world();
    world.set_timeout(std::chrono::seconds(options.communication_timeout));
    const bool speaks = world.rank() == 0;
    Console console(speaks);

    // As many threads as OMP_NUM_THREADS says, or else this process's share of the machine's cores.
    const std::unique_ptr<Device> device = make_cpu_device(std::getenv("OMP_NUM_THREADS") ? 0 : mpi.cores());
    const Mesh mesh{.data_ranks = world.size(), .data_rank = world.rank()};
    const RunPlan plan = plan_run({.config = options.config(),
                                   .dtype = options.compute_dtype(),
                                   .mesh = mesh,
                                   .global_batch_tokens = *options.global_batch_tokens,
                                   .micro_batch_sequences = options.micro_batch_size.value_or(0),
                                   .machine = {.bytes = options.print_step ? 0 : device->available_memory(),
                                               .processes = mpi.local_size()}},
                                  device->ops(), MpiCommunicator::staging_bytes(world.size()));
    if (options.print_step) {
        std::vector<std::string> names;
        for (const UnitLayout& unit : plan.store.units) names.push_back(unit.name());
        console.text(to_string(plan.training, names));
        return;
    }

    const Data data = open_data({.train_data = options.train_data,
                                 .val_data = options.val_data,
                                 .vocabulary = options.vocabulary.value(),
                                 .sequence_length = options.sequence_length.value(),
                                 .sequences = plan.global_sequences()});
    Run run{.options = options,
            .data = data,
            .plan = plan,
            .out_dir = choose_out_dir(options),
            .identity = {},
            .checkpoint = {}};
    run.checkpoint = find_checkpoint(options, run.out_dir);
    run.identity = run.checkpoint ? run.checkpoint->run : new_run_identity();
    const std::vector<std::string> notes =
        run.checkpoint ? differences(*run.checkpoint, options) : std::vector<std::string>();
    encode_prompt(options.prompt, plan.spec.config.vocabulary);
    if (speaks) check_outputs(options, run.out_dir, data.files, count_parameters(plan.spec.config));
    // Whatever can be found wrong at once has been: only now memory is taken, which ranks count as free before.
    world.barrier();

    console.header(fmt::format("train_gpt {} (commit {})", version(), commit()), header_rows(run, *device));
    Trainer trainer(options, plan, *device, world);
    world.set_staging(trainer.arenas()[plan.communication]);
    if (run.checkpoint) {
        for (const std::string& note : notes) console.note(note);
        trainer.resume(*run.checkpoint);
        console.note(fmt::format("going on from {} after step {}", run.checkpoint->directory.string(),
                                 trainer.progress().step));
    } else if (options.resume) {
        console.note(
            fmt::format("the last run in {} saved no checkpoint: starting fresh", run.out_dir.string()));
    }
    require_same_step(world, trainer.progress().step);
    world.barrier();  // all ranks have what they need: nothing is written before
    train(run, trainer, console, speaks);
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
    // A file beyond the limit of its size (ulimit -f) is then a write that fails, with a line that says so.
    std::signal(SIGXFSZ, SIG_IGN);
    llmc::let_waiting_threads_sleep(argv);
    llmc::MpiEnvironment mpi;
    try {
        std::string text;
        if (const auto options = llmc::parse_options(argc, argv, text)) {
            llmc::run_program(*options, mpi);
        } else {
            llmc::Console(mpi.world().rank() == 0).text(text);
        }
    } catch (const std::exception& fault) {
        mpi.fail(fault.what());
    }
    return 0;
}
