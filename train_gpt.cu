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
#include <nlohmann/json.hpp>
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
#include "llmc/plan/run_plan.h"
#include "llmc/train/console.h"
#include "llmc/train/options.h"
#include "llmc/train/outputs.h"
#include "llmc/train/resume.h"
#include "llmc/train/trainer.h"

namespace llmc {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

// Everything that is known before the first step.
struct Run {
    Options options;
    const Data& data;
    const RunPlan& plan;
    fs::path out_dir;
    std::optional<CheckpointInfo> checkpoint;
};

std::vector<std::pair<std::string, std::string>> header_rows(const Run& run, const Device& device) {
    const GPTConfig& config = run.plan.spec.config;
    const std::string note = device.note(run.plan.spec.dtype);
    std::string memory;
    for (const ArenaKind kind : all_arenas) {
        if (run.plan.memory.bytes(kind) > 0) {
            memory += fmt::format("{} {}, ", name_of(kind), human_bytes(run.plan.memory.bytes(kind)));
        }
    }
    std::vector<std::pair<std::string, std::string>> rows = {
        {"device", fmt::format("{}, {}{}", device.description(), name_of(run.plan.spec.dtype),
                               note.empty() ? "" : " (" + note + ")")},
        {"mesh", run.plan.spec.mesh.description()},
        {"model",
         fmt::format("{}: {} layers, {} heads, {} channels, context {}, vocabulary {}; {} parameters",
                     run.options.model, config.layers, config.heads, config.channels, config.sequence_length,
                     config.vocabulary, grouped(count_parameters(config)))},
        {"memory", fmt::format("{}total {} a process", memory, human_bytes(run.plan.memory.total_bytes()))},
        {"training", run.data.training_description},
        {"validation", run.data.validation ? run.data.validation_description : "none"},
    };
    if (run.data.unigram_loss) {
        rows.emplace_back(
            "baseline",
            fmt::format("a unigram model's loss is {:.5f}", *run.data.unigram_loss) +
                (run.data.source_entropy ? fmt::format(", the source's own entropy {:.5f} nats per token",
                                                       *run.data.source_entropy)
                                         : " nats per token"));
    }
    rows.emplace_back("step", fmt::format("{} tokens = {} x {} x {} x {} tokens",
                                          grouped(run.plan.spec.global_batch_tokens),
                                          plural(run.plan.spec.mesh.data_ranks, "process", "es"),
                                          plural(run.plan.micro_batches, "micro-batch", "es"),
                                          plural(run.plan.micro_batch, "sequence"), config.sequence_length));
    rows.emplace_back(
        "schedule", fmt::format("{} steps, learning rate {} {} to {}, warmup {}", grouped(run.options.steps),
                                *run.options.learning_rate, run.options.schedule,
                                run.options.schedule_kind() == ScheduleKind::constant
                                    ? *run.options.learning_rate
                                    : *run.options.learning_rate * run.options.min_lr_fraction,
                                *run.options.warmup_steps));
    rows.emplace_back("results", run.out_dir.string());
    return rows;
}

// The first line of the metrics.
Json run_record(const Run& run, const Device& device) {
    Json record = {
        {"program", "train_gpt"},
        {"version", version()},
        {"commit", commit()},
        {"configuration", to_json(run.options)},
        {"device", device.description()},
        {"mesh", {{"world", run.plan.spec.mesh.world()}, {"data", run.plan.spec.mesh.data_ranks}}},
        {"parameters", count_parameters(run.plan.spec.config)},
        {"micro_batch_sequences", run.plan.micro_batch},
        {"micro_batches", run.plan.micro_batches},
    };
    for (const ArenaKind kind : all_arenas)
        record["memory"][std::string(name_of(kind))] = run.plan.memory.bytes(kind);
    if (run.data.unigram_loss) record["unigram_loss"] = *run.data.unigram_loss;
    if (run.data.source_entropy) record["source_entropy"] = *run.data.source_entropy;
    return record;
}

// The best validation so far, for the summary.
struct Best {
    std::optional<double> loss;
    std::int64_t step = 0;

    void see(double value, std::int64_t at) {
        if (!loss || value < *loss) loss = value, step = at;
    }
};

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
        write_file(run.out_dir / "config.toml", to_toml(options));
    }

    Best best;
    const auto validate = [&]() -> std::optional<double> {
        if (!validation) return std::nullopt;
        const std::int64_t some = options.val_batches * run.plan.global_sequences();
        const std::int64_t all = validation->windows();
        const double loss = trainer.validate(*validation, some == 0 ? all : std::min(some, all));
        best.see(loss, trainer.progress().step);
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
    fs::path saved;
    const auto save = [&] {
        if (!speaks) return;
        trainer.require_finite();
        saved = save_checkpoint(run.out_dir, trainer.progress(), to_json(options), trainer.device(),
                                trainer.store());
    };
    const auto due = [](std::int64_t every, std::int64_t step) { return every > 0 && step % every == 0; };

    const auto start = std::chrono::steady_clock::now();
    const std::int64_t first_step = trainer.progress().step;
    while (trainer.progress().step < options.steps) {
        StepMetrics line = trainer.train_step(samples);
        const bool last = line.step == options.steps;
        if (last || due(options.val_every, line.step)) line.val_loss = validate();

        if (metrics) metrics->write(line);
        console.step(line, options.steps);
        if (line.val_loss) console.validation(line.step, *line.val_loss);
        if (!last && due(options.sample_every, line.step)) sample();
        if (last || due(options.checkpoint_every, line.step)) save();
    }
    const std::int64_t steps_done = trainer.progress().step - first_step;
    if (steps_done == 0) {
        // Nothing to train: an evaluation of the weights as they are.
        if (const auto loss = validate()) console.validation(trainer.progress().step, *loss);
    }
    sample();
    if (speaks && !options.export_file.empty()) {
        make_directory(fs::absolute(options.export_file).parent_path());
        save_weights(options.export_file, trainer.device(), trainer.store(), false);
    }

    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (best.loss) {
        console.text(fmt::format("best validation loss {:.5f} after step {}", *best.loss, best.step));
        if (run.data.unigram_loss) {
            console.text(fmt::format(", {:.0f}% of the unigram model's {:.5f}",
                                     100 * *best.loss / *run.data.unigram_loss, *run.data.unigram_loss));
        }
        if (run.data.source_entropy)
            console.text(fmt::format("; the source's entropy is {:.5f}", *run.data.source_entropy));
        console.text("\n");
    }
    if (steps_done > 0) {
        const auto tokens = static_cast<double>(steps_done * run.plan.spec.global_batch_tokens);
        console.text(fmt::format("{} in {:.1f} s, {} tokens/s with validation and saving\n",
                                 plural(steps_done, "step"), elapsed.count(),
                                 grouped(static_cast<std::int64_t>(tokens / elapsed.count()))));
        console.text(
            fmt::format("results in {}; the last checkpoint is {}\n", run.out_dir.string(), saved.string()));
    }
    if (!options.export_file.empty()) console.text(fmt::format("exported {}\n", options.export_file));
}

// Where results go: as asked, beside the checkpoint that is resumed, or a directory of its own by the time.
fs::path choose_out_dir(const Options& options) {
    if (!options.out_dir.empty()) return options.out_dir;
    if (options.resume && !options.resume->empty())
        return fs::absolute(*options.resume).lexically_normal().parent_path();
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
    Run run{
        .options = options, .data = data, .plan = plan, .out_dir = choose_out_dir(options), .checkpoint = {}};
    run.checkpoint = find_checkpoint(options, run.out_dir);
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
        console.note(fmt::format("{} holds no checkpoint: starting fresh", run.out_dir.string()));
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
