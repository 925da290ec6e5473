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
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/comm/bootstrap.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/data/bpe_files.h"
#include "llmc/data/data.h"
#include "llmc/data/samples.h"
#include "llmc/data/tokenizer.h"
#include "llmc/data/training_batches.h"
#include "llmc/device/cpu/openmp_wait.h"
#include "llmc/device/device.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/files.h"
#include "llmc/io/last_run.h"
#include "llmc/io/metrics.h"
#include "llmc/io/model_files.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/algorithms.h"
#include "llmc/train/command_line.h"
#include "llmc/train/console.h"
#include "llmc/train/devices.h"
#include "llmc/train/generate.h"
#include "llmc/train/model_report.h"
#include "llmc/train/options.h"
#include "llmc/train/outputs.h"
#include "llmc/train/pipeline_report.h"
#include "llmc/train/pipeline_watch.h"
#include "llmc/train/plan_report.h"
#include "llmc/train/report.h"
#include "llmc/train/resume.h"
#include "llmc/train/stop.h"
#include "llmc/train/terminal.h"
#include "llmc/train/trainer.h"

namespace llmc {
namespace {

namespace fs = std::filesystem;

// How a run that met no error ends.
enum class Ending { done, stopped };

// Weights as the seed makes them are nothing to look at.
bool has_given_weights(const Run& run) { return run.checkpoint || !run.options.init.empty(); }

// Trains to the last step, then validates, samples, saves and exports; or until it is asked to stop, and saves.
// `speaks`: this rank writes files and samples.
Ending train(const Run& run, Trainer& trainer, Communicator& world, Console& console,
             const StopSignals& signals) {
    const bool speaks = world.rank() == 0;
    const Options& options = run.options;
    const Model& model = run.plan.spec.model;
    const TrainingSamples samples(*run.data.training, model.sequence_length, options.seed);
    TrainingBatches batches(samples, run.plan.share(), model.sequence_length);
    std::optional<ValidationWindows> validation;
    if (run.data.validation) validation.emplace(*run.data.validation, model.sequence_length);

    std::optional<MetricsWriter> metrics;
    if (!run.trains && run.checkpoint && holds_records(options, run.out_dir))
        console.note(records_stay(options, run.out_dir, run.writes));
    // The metrics first: where they cannot be written nothing is.
    if (speaks && run.writes.metrics) {
        metrics.emplace(metrics_file(options, run.out_dir), run_record(run, trainer.device()),
                        trainer.progress().step);
    }
    if (speaks && run.writes.record) {
        make_directory(run.out_dir);
        write_last_run(run.out_dir, {.identity = run.identity,
                                     .began_from = run.checkpoint ? run.checkpoint->directory : fs::path()});
        write_file(run.out_dir / "config.toml", to_toml(options));
        if (!trainer.algorithms().empty()) write_file(run.out_dir / algorithms_file, trainer.algorithms());
    }

    const std::optional<fs::path> drawings =
        speaks && run.writes.record ? std::optional(run.out_dir) : std::nullopt;
    std::optional<PipelineWatch> pipeline_watch;
    if (options.pipeline_timeline) {
        show_expected(console, run.plan, trainer.device().peak_flops(run.plan.spec.dtype), drawings);
        if (run.trains) pipeline_watch.emplace(run.plan, world);
        trainer.watch_actions(run.trains);
    }

    // Who reads what is said may end before the run does, as Ctrl-C ends `| tee log`: what was trained is saved all the same.
    std::signal(SIGPIPE, SIG_IGN);
    Outcome outcome;
    bool stopping = false;  // the same on all ranks
    const auto ask_all = [&] { return stopping = stopping || signals.anywhere(world); };
    const auto validate = [&]() -> std::optional<double> {
        if (!validation) return std::nullopt;
        const std::int64_t some = options.val_batches * run.plan.global_sequences();
        const std::int64_t all = validation->windows();
        const auto watch = [&](double share) {
            console.doing("validating", share);
            return !ask_all();
        };
        const auto loss = trainer.validate(*validation, some == 0 ? all : std::min(some, all), watch);
        if (loss) outcome.see_validation(*loss, trainer.progress().step);
        return loss;
    };
    const auto score = [&]() -> std::optional<HellaSwagScore> {
        if (!run.hellaswag) return std::nullopt;
        const auto watch = [&](double share) {
            console.doing("scoring", share);
            return !ask_all();
        };
        const auto read = [&](std::int64_t row, auto inputs, auto targets) {
            run.hellaswag->read(row, inputs, targets);
        };
        const auto losses = trainer.losses_of_rows(run.hellaswag->rows(), read, watch);
        if (!losses) return std::nullopt;
        return run.hellaswag->score(*losses);
    };
    const BytePairEncoder* const bpe = run.bpe ? &*run.bpe : nullptr;
    const auto sample = [&] {
        const bool together = trainer.generates_together();
        if (options.sample_tokens == 0 || (!speaks && !together)) return;
        const auto watch = [&](double share) {
            console.doing("sampling", share);
            return together ? !ask_all() : !signals.here();
        };
        std::vector<std::int32_t> tokens = run.prompt;
        const auto more = trainer.generate(run.prompt, options.sample_tokens, watch);
        if (!more || !speaks) return;
        tokens.insert(tokens.end(), more->begin(), more->end());
        console.sample(trainer.progress().step, decode(tokens, model.vocabulary, bpe));
    };
    const auto save = [&] {
        console.doing("saving", 0);
        trainer.require_finite();
        outcome.checkpoint =
            save_checkpoint(run.out_dir, run.identity, run.lineage, trainer.progress(), to_json(options),
                            trainer.algorithms(), trainer.store(), trainer.transfer());
        trainer.saved();
    };
    const auto due = [](std::int64_t every, std::int64_t step) { return every > 0 && step % every == 0; };
    const auto validates_after = [&](std::int64_t step) {
        return step == options.steps || due(options.val_every, step);
    };

    const auto scores_after = [&](std::int64_t step) {
        return run.hellaswag && (step == options.steps || due(options.eval_every, step));
    };

    const auto start = std::chrono::steady_clock::now();
    const std::int64_t first_step = trainer.progress().step;
    console.begin(first_step + 1, options.steps);
    if (metrics) {
        for (const auto& [step, loss] : metrics->earlier_validations()) outcome.see_validation(loss, step);
    }
    if (run.checkpoint && plain_path(run.checkpoint->directory).parent_path() == plain_path(run.out_dir))
        outcome.checkpoint = run.checkpoint->directory;
    // Where there is nothing to train, an evaluation of weights that were given; and what a run did not come to
    // when it was asked to stop.
    const bool lacks_validation =
        validates_after(first_step) && on_any_rank(world, metrics && metrics->lacks_validation());
    const bool lacks_score =
        scores_after(first_step) && on_any_rank(world, metrics && metrics->lacks_hellaswag());
    const bool looks = run.trains || has_given_weights(run);
    std::optional<double> loss_before;
    std::optional<HellaSwagScore> score_before;
    if (looks && (lacks_validation || first_step >= options.steps)) {
        loss_before = validate();
        if (loss_before) {
            if (speaks && lacks_validation) metrics->add_validation(*loss_before);
            console.validation(first_step, *loss_before);
        }
    }
    if (looks && (lacks_score || first_step >= options.steps)) {
        score_before = score();
        if (score_before) {
            if (speaks && lacks_score) metrics->add_hellaswag(*score_before);
            console.hellaswag(first_step, *score_before);
        }
    }
    if (metrics && !run.trains)
        metrics->write_evaluation(first_step, trainer.tokens(), loss_before, score_before);
    while (trainer.progress().step < options.steps && !stopping) {
        const bool compares = due(options.check_replicas_every, trainer.progress().step + 1);
        StepMetrics line = trainer.train_step(batches, compares);
        if (pipeline_watch) pipeline_watch->see(line.step, trainer.action_times());
        const bool last = line.step == options.steps;
        console.step(line);
        if (validates_after(line.step)) line.val_loss = validate();
        if (scores_after(line.step) && !stopping) line.hellaswag = score();
        if (metrics) metrics->write(line);
        if (line.val_loss) console.validation(line.step, *line.val_loss);
        if (line.hellaswag) console.hellaswag(line.step, *line.hellaswag);
        if (!last && due(options.sample_every, line.step)) sample();
        if (ask_all() || last || due(options.checkpoint_every, line.step)) save();
    }
    outcome.last_step = trainer.progress().step;
    outcome.steps = outcome.last_step - first_step;
    if (!stopping) {
        if (looks) sample();
        ask_all();
    }
    if (!options.export_file.empty() && !stopping) {
        try {
            if (speaks) make_directory(fs::absolute(options.export_file).parent_path());
            save_weights(options.export_file, trainer.store(), trainer.transfer(), false);
        } catch (const UserError& fault) {
            const std::string command = command_to_export(run, outcome);
            if (command.empty()) throw;
            user_error("{}; the run is whole but for this, which its checkpoint makes up for: {}",
                       fault.what(), command);
        }
    }
    if (pipeline_watch) {
        if (const auto measured = pipeline_watch->gather())
            show_measured(console, run.plan, *measured, drawings);
    }
    outcome.stopped = stopping;
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    console.summary(summary_rows(run, outcome), command_to_go_on(run, outcome));
    return stopping ? Ending::stopped : Ending::done;
}

bool stopped_early(Communicator& world, Console& console, const StopSignals& signals) {
    if (!signals.anywhere(world)) return false;
    console.note("stopped before the first step: nothing was written");
    return true;
}

// Ends the job with the line of the exception that is being handled. Options: null where they are what is wrong.
[[noreturn]] void end_failed(const Job& job, const Options* options) {
    try {
        throw;
    } catch (const DeviceFault& fault) {
        const bool could_name = options != nullptr && !options->cuda_sync;
        job.fail(fmt::format("{}{}", fault.what(),
                             could_name ? "; if a kernel is to blame, --cuda-sync names it" : ""));
    } catch (const UserError& fault) {
        job.fail(options != nullptr ? with_place(*options, fault.what()) : fault.what());
    } catch (const std::exception& fault) {
        job.fail(fault.what());
    }
}

// The same on a GPU, whose memory could not be freed before what is under way there ends, which may wait for ranks that are
// gone.
void end_on_gpu(Device& device, const Job& job, const Options& options) {
    if (device.queues()) end_failed(job, &options);
}

// From the state in which the run begins, its checkpoint's or a fresh one; `notes` say how that one's options differ.
Ending begin_and_train(Run& run, Trainer& trainer, const std::vector<std::string>& notes,
                       HostCommunicator& world, Console& console, const StopSignals& signals) {
    const Options& options = run.options;
    const bool speaks = world.rank() == 0;
    if (run.checkpoint) {
        for (const std::string& note : notes) console.note(note);
        naming_a_whole_one(options, run.out_dir, [&] { trainer.resume(*run.checkpoint); });
        console.note(fmt::format("going on from {} after step {}", run.checkpoint->directory.string(),
                                 trainer.progress().step));
    } else if (options.resume) {
        const std::string place =
            (options.out_dir.empty() ? run.out_dir.parent_path() : run.out_dir).string();
        console.note(holds_records(options, run.out_dir)
                         ? fmt::format("the last run in {} saved no checkpoint: starting fresh", place)
                         : fmt::format("there is no run in {} to go on with: starting fresh", place));
    }
    require_same_step(world, trainer.progress().step);
    trainer.choose_algorithms(run.algorithms.earlier, std::ssize(run.prompt));
    // All ranks have what they need: nothing is written before.
    if (stopped_early(world, console, signals)) return Ending::stopped;
    if (speaks) {
        const std::int64_t chosen = keep_algorithms(run.algorithms, trainer.algorithms(), run.identity);
        if (chosen > 0 && !run.algorithms.origin.empty())
            console.note(fmt::format("{} chosen now, which no earlier run had", plural(chosen, "algorithm")));
    }
    if (!speaks || !options.out_dir.empty() || options.resume || !run.trains)
        return train(run, trainer, world, console, signals);
    const fs::path claimed = claim_directory(run.out_dir);
    if (claimed != run.out_dir) console.note(fmt::format("results go to {}", claimed.string()));
    run.out_dir = claimed;
    try {
        return train(run, trainer, world, console, signals);
    } catch (...) {
        // Where nothing came to be written (what is not empty stays).
        std::error_code ignored;
        fs::remove(claimed, ignored);
        fs::remove(claimed.parent_path(), ignored);
        throw;
    }
}

// Continues the prompt, and does nothing else.
void generate(const Options& options, const RunPlan& plan, Device& device, const MeshRanks& ranks, Job& job,
              StopSignals& signals) {
    HostCommunicator& world = job.world();
    const std::optional<BytePairEncoder> bpe = find_bpe(options.bpe_directory, plan.spec.model.vocabulary);
    const std::vector<std::int32_t> prompt =
        encode_prompt(options.prompt, plan.spec.model.vocabulary, bpe ? &*bpe : nullptr);
    const std::optional<CheckpointInfo> checkpoint = find_checkpoint(options, choose_out_dir(options));
    if (checkpoint) {
        differences(*checkpoint, options);
    } else {
        const std::string note = naming_option(
            "--init", [&] { return check_weights(options.init, *plan.outline, plan.store.units); });
        if (world.rank() == 0 && !note.empty()) say_beside_text("note: " + note);
    }
    if (world.rank() == 0) {
        for (const std::string& note : options.notes) say_beside_text("note: " + note);
    }
    signals.answer_silently();
    Trainer trainer(options, plan, device, world, ranks.groups, checkpoint.has_value());
    if (!ranks.nccl) world.set_staging(trainer.arenas()[plan.communication]);
    try {
        if (checkpoint) trainer.resume(*checkpoint);
        require_same_step(world, trainer.progress().step);
        const std::string weights =
            checkpoint
                ? fmt::format("{} after step {}", checkpoint->directory.string(), trainer.progress().step)
                : options.init;
        Generation generation{.options = options,
                              .plan = plan,
                              .prompt = prompt,
                              .text = TextStream(plan.spec.model.vocabulary, bpe ? &*bpe : nullptr),
                              .weights = weights};
        generate_text(generation, trainer, world, signals);
    } catch (...) {
        end_on_gpu(device, job, options);
        throw;
    }
}

RunSpec run_spec(const Options& options, const Mesh& mesh, const Device& device) {
    return {.model = options.make_model(),
            .dtype = options.compute_dtype(),
            .gradient_dtype = options.kept_gradient_dtype(),
            .mesh = mesh,
            .usual_reduction = options.derived.contains("reduce-every"),
            .pipeline_schedule = options.kind_of_pipeline_schedule(),
            .virtual_stages = options.chunks_of_stage(),
            .pipeline_layers = options.pipeline_layers,
            .recompute = options.recomputation(),
            .trains = !options.generate,
            .global_batch_tokens = *options.global_batch_tokens,
            .micro_batch_sequences = options.micro_batch_size.value_or(0),
            .usual_micro_batch_tokens = device.usual_tokens(),
            // Of which generation needs a row.
            .logits_bytes = options.generate ? 0 : device.usual_logits_bytes()};
}

// What the options ask for, on the ranks' mesh (none where a plan is all).
Ending run_on_mesh(Options& options, const std::string& program, const Place& here, RunSpec spec,
                   const std::optional<MeshRanks>& ranks, Job& job, Console& console, StopSignals& signals) {
    HostCommunicator& world = job.world();
    const bool speaks = world.rank() == 0;
    Device& device = *here.device;
    const std::size_t staging = staging_bytes(world, device);
    if (!options.plans_only()) spec.machine = free_memory(here, world);
    const RunPlan plan = plan_run(spec, device.ops(), staging);
    if (options.plans_only()) {
        if (speaks) show_plan(options, plan, device, staging, console);
        return Ending::done;
    }
    if (options.generate) {
        generate(options, plan, device, *ranks, job, signals);
        return Ending::done;
    }

    const Data data = open_data({.train_data = options.train_data,
                                 .val_data = options.val_data,
                                 .vocabulary = options.vocabulary(),
                                 .sequence_length = options.sequence_length(),
                                 .sequences = plan.global_sequences()});
    Run run{.options = options,
            .data = data,
            .plan = plan,
            .out_dir = choose_out_dir(options),
            .identity = new_run_identity(),
            .lineage = {},
            .program = program,
            .no_gpu = here.note,
            .checkpoint = {},
            .trains = options.steps > 0,
            .writes = {},
            .communicator_memory = ranks->memory,
            .algorithms = {},
            .bpe = find_bpe(options.bpe_directory, plan.spec.model.vocabulary),
            .prompt = {},
            .hellaswag = {}};
    const BytePairEncoder* const bpe = run.bpe ? &*run.bpe : nullptr;
    run.checkpoint = find_checkpoint(options, run.out_dir);
    if (options.resume && !options.resume->empty() && run.checkpoint->progress.step >= options.steps)
        run.trains = false;
    run.writes = what_is_written(options, run.out_dir, run.trains, run.checkpoint.has_value());
    run.lineage = run.checkpoint ? run.checkpoint->lineage : run.identity;
    const std::vector<std::string> notes =
        run.checkpoint ? differences(*run.checkpoint, options) : std::vector<std::string>();
    run.prompt = encode_prompt(options.prompt, plan.spec.model.vocabulary, bpe);
    if (!options.eval_hellaswag.empty()) {
        run.hellaswag.emplace(options.eval_hellaswag, options.eval_examples, plan.spec.model, bpe);
    }
    if (speaks)
        check_outputs(options, run.out_dir, run.writes, data.files, count_parameters(plan.spec.model));
    std::string init_note;
    if (!options.init.empty() && !run.checkpoint)
        init_note = naming_option(
            "--init", [&] { return check_weights(options.init, *plan.outline, plan.store.units); });
    if (speaks) run.algorithms = find_algorithms(run.checkpoint, run.out_dir, device);
    // Whatever can be found wrong at once has been, on all ranks: only now memory is taken, which ranks count as
    // free before.
    if (stopped_early(world, console, signals)) return Ending::stopped;

    console.header(fmt::format("train_gpt {} (commit {})", version(), commit()), header_rows(run, device));
    for (const std::string& note : options.notes) console.note(note);
    if (!data.note.empty()) console.note(data.note);
    if (!init_note.empty()) console.note(init_note);
    if (!bpe && plan.spec.model.vocabulary == gpt2_vocabulary && options.sample_tokens > 0) {
        console.note(fmt::format(
            "samples and --prompt are token ids; with GPT-2's {} and {} in {} or --bpe-dir they are text",
            bpe_ids_file, bpe_merges_file, usual_bpe_directory));
    }
    if (options.verbose) console.text(places_text(plan) + "\n");
    const bool writes = run.writes.record || run.writes.metrics || !options.export_file.empty();
    if (!run.trains && !has_given_weights(run) && !writes) return Ending::done;
    Trainer trainer(options, plan, device, world, ranks->groups, run.checkpoint.has_value());
    if (!ranks->nccl) world.set_staging(trainer.arenas()[plan.communication]);
    try {
        return begin_and_train(run, trainer, notes, world, console, signals);
    } catch (...) {
        console.remove_progress();
        end_on_gpu(device, job, options);
        throw;
    }
}

Ending run_program(Options& options, const std::string& program, Job& job, Console& console,
                   StopSignals& signals) {
    HostCommunicator& world = job.world();
    world.set_timeout(std::chrono::seconds(options.communication_timeout));
    const Place here = open_device(options, job);
    const Mesh mesh = options.mesh(options.processes_of_plan(world.size()), world.rank());
    settle_mesh(options, mesh);
    std::optional<MeshRanks> ranks;
    const RunSpec spec = run_spec(options, mesh, *here.device);
    if (options.print_model) {
        console.text(model_text(spec));
        return Ending::done;
    }
    if (!options.plans_only()) ranks.emplace(open_mesh(options, world, *here.device, spec));
    const Ending ending = run_on_mesh(options, program, here, spec, ranks, job, console, signals);
    // NCCL's communicators end without waiting for others, which may still need this rank's part.
    if (ranks && ranks->nccl) ranks->nccl->barrier();
    return ending;
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
    // A file beyond the limit of its size (ulimit -f) is then a write that fails, with a line that says so.
    std::signal(SIGXFSZ, SIG_IGN);
    llmc::fill_standard_streams();
    llmc::let_waiting_threads_sleep(argv);
    llmc::StopSignals signals;
    llmc::Job job;
    std::optional<llmc::Options> options;
    try {
        llmc::Console console(job.world().rank() == 0);
        if (job.world().rank() == 0) {
            signals.answer_with(
                console.over_progress(
                    "stopping as soon as what is under way is done; a second signal stops at once\n"),
                console.over_progress(""));
        }
        std::string text;
        options = llmc::parse_options(argc, argv, text);
        if (options) {
            const std::string program = llmc::program_as_called({argv, static_cast<std::size_t>(argc)});
            const bool stopped =
                llmc::run_program(*options, program, job, console, signals) == llmc::Ending::stopped;
            if (stopped) {
                // (With this status a scheduler starts it again, whatever became of its output.)
                if (const std::string lost = console.what_was_lost(); !lost.empty())
                    fmt::print(stderr, "note: {}\n", lost);
                job.end(llmc::stopped_status);
            }
        } else {
            console.text(text);
        }
        console.require_written();
    } catch (const std::exception&) {
        llmc::end_failed(job, options ? &*options : nullptr);
    }
    return 0;
}
