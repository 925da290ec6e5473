// train_gpt: trains a GPT from scratch.
//
//   make train_gpt && ./train_gpt --processes 8
//
// This file is the top level of the program. main() prepares the run that the options describe; train() is
// the training loop. Each object that they use does one job; its header in llmc/train/ or llmc/data/ says
// which.
//
// One step is data: a list of actions. llmc/parallel/step/build_step.h makes a rank's list before the run,
// and llmc/parallel/step/executor.h performs it. `./train_gpt --layers 1 --print-step` prints the list for a
// model of one layer:
//
//     #  after  stream         action            on         micro  reads -> writes
//     0         compute        load                             0  -> tokens
//     1         compute        update            wte               gradients wte, norm, optimizer wte -> optimize ...
//     2         compute        update            wpe               gradients wpe, norm, optimizer wpe -> optimize ...
//     3         compute        update            h.0               gradients h.0, norm, optimizer h.0 -> optimize ...
//     4         compute        forward           embedding      0  tokens, parameters wte, parameters wpe -> input
//     5         compute        update            ln_f              gradients ln_f, norm, optimizer ln_f -> optimi ...
//     6         compute        forward           block 0        0  input, parameters h.0 -> saved 0, residual 1
//     7         compute        zero              wte               -> gradients wte
//     8         compute        zero              ln_f              -> gradients ln_f
//     9         compute        backward          head           0  tokens, residual 1, parameters ln_f, parameter ...
//    10         compute        zero              h.0               -> gradients h.0
//    11         compute        backward          block 0        0  saved 0, input, dresidual, parameters h.0 -> d ...
//    12         compute        zero              wpe               -> gradients wpe
//    13         compute        backward          embedding      0  tokens, dresidual -> gradients wte, gradients wpe
//    14         compute        square                              gradients wte, gradients wpe, gradients h.0, g ...
//    15         compute        norm                                squares -> norm
//
// The updates are those of the step before: AdamW on a unit comes when its parameters are about to be needed.
// The head has no forward action: its backward action includes the forward pass, because logits are not kept.
// The action `zero` clears gradients, `square` and `norm` compute their norm, and `update` is AdamW. The
// buffers `saved 0` and `residual 1` belong to the first block. More ranks add communication to the list.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "llmc/comm/launcher.h"
#include "llmc/core/error.h"
#include "llmc/data/samples.h"
#include "llmc/data/training_batches.h"
#include "llmc/device/cuda/gpus.h"
#include "llmc/planner/plan_command.h"
#include "llmc/train/chat.h"
#include "llmc/train/checkpointer.h"
#include "llmc/train/command_line.h"
#include "llmc/train/evaluator.h"
#include "llmc/train/generate.h"
#include "llmc/train/pipeline_report.h"
#include "llmc/train/prepared_run.h"
#include "llmc/train/records.h"
#include "llmc/train/report.h"
#include "llmc/train/run_locks.h"
#include "llmc/train/session.h"

namespace {

void prepare_and_run(llmc::Session& session, std::unique_ptr<llmc::PreparedRun>& run);
bool prepare(llmc::PreparedRun& run);
void train(llmc::PreparedRun& run);

}  // namespace

int main(int argc, char** argv) {
    // What is only planned or printed starts no other process.
    if (const std::optional<int> status = llmc::plan_command(argc, argv)) return *status;
    // With --processes N, this process only starts N others and waits for them.
    if (const std::optional<int> status = llmc::launch_processes(argc, argv)) return *status;
    llmc::prepare_gpus();
    llmc::Session session(argc, argv);  // joins the other ranks
    std::unique_ptr<llmc::PreparedRun> run;
    session.guard([&] { prepare_and_run(session, run); });  // an error ends the job here
    run.reset();
    return session.finish();
}

namespace {

// From the command line to the weights in memory, and then what the options ask for.
void prepare_and_run(llmc::Session& session, std::unique_ptr<llmc::PreparedRun>& run) {
    if (!session.read_options()) return;  // --help or --version was printed
    if (session.options().plans_only()) return llmc::print_in_job(session);
    if (!session.options().verify_checkpoint.empty()) return llmc::verify_in_job(session);
    llmc::RunLocks locks;
    do {
        // With --resume-if-any, if another start went on with the run meanwhile, this one begins anew after that.
        do {
            run.reset();
            locks.release();
            run = std::make_unique<llmc::PreparedRun>(session);
            if (!prepare(*run)) return;
        } while (!locks.lock_named(*run));
        run->announce();
        if (!run->has_work()) return;
    } while (!run->load_weights());  // a damaged checkpoint is passed over
    if (session.stops_early()) return;
    if (run->options.chat) {
        llmc::chat(*run);
    } else if (run->options.generate) {
        llmc::generate_text(*run);
    } else {
        train(*run);
    }
}

// Up to the open files. Writes nothing. False if a signal asks to stop.
bool prepare(llmc::PreparedRun& run) {
    llmc::Session& session = run.session;
    run.earlier_record = llmc::wait_for_other_starts(session);
    if (session.stops_early()) return false;

    run.choose_device_and_mesh();
    run.plan_memory();
    run.open_files();
    return !session.stops_early();
}

// Trains to the last step, or until a signal asks it to stop. With --steps 0 it only evaluates the given
// weights.
void train(llmc::PreparedRun& run) {
    const llmc::Options& options = run.options;
    llmc::Session& session = run.session;
    llmc::Trainer& trainer = *run.trainer;

    const llmc::TrainingSamples samples(*run.data.training, run.model().sequence_length, options.seed);
    llmc::TrainingBatches batches(samples, run.plan.share(), run.model().sequence_length);
    llmc::Records records(run);
    llmc::PipelineRecorder pipeline_recorder(run, records.folder());
    llmc::Evaluator evaluator(run, records);
    llmc::Sampler sampler(run);
    llmc::Checkpointer checkpointer(run);

    const auto start = std::chrono::steady_clock::now();
    const std::int64_t first_step = trainer.progress().step + 1;
    session.console().begin(first_step, options.steps);
    const std::optional<double> given_loss = evaluator.evaluate_given_weights();
    if (options.keep_best && evaluator.is_best(given_loss)) checkpointer.save_best(*given_loss);
    try {
        while (trainer.progress().step < options.steps && !session.is_stopping()) {
            // Performs the list above: the update of the step before, forward and backward of every micro-batch, the
            // sum over ranks.
            llmc::StepMetrics step = trainer.train_step(batches);
            pipeline_recorder.see(step.step);
            session.console().step(step);
            evaluator.evaluate(step);  // adds the validation loss and the HellaSwag score to the step, if due
            records.write(step);
            session.console().evaluation(step);
            if (options.keep_best && evaluator.is_best(step.val_loss)) checkpointer.save_best(*step.val_loss);
            if (sampler.is_due(step.step)) sampler.sample();
            const bool is_last = step.step == options.steps;
            // All ranks ask together: a signal may have come to any of them.
            if (checkpointer.ask_to_stop() || is_last || llmc::is_due(options.checkpoint_every, step.step))
                checkpointer.save();
        }
        checkpointer.finish();
    } catch (const llmc::UserError& fault) {
        checkpointer.finish_after(fault);
        throw;
    }
    const bool stopped = session.is_stopping();
    if (!stopped && (run.trains || run.has_given_weights())) sampler.sample();
    if (!session.ask_to_stop()) checkpointer.export_weights();
    pipeline_recorder.show();

    const std::int64_t last_step = trainer.progress().step;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const llmc::Outcome outcome{.steps = last_step + 1 - first_step,
                                .seconds = seconds.count(),
                                .best = evaluator.best(),
                                .checkpoint = checkpointer.last(),
                                .best_checkpoint = checkpointer.best(),
                                .last_step = last_step,
                                .stopped = session.is_stopping()};
    session.console().summary(llmc::summary_rows(run, outcome), llmc::suggestions(run, outcome));
    if (!session.is_stopping()) records.require_written();  // a stopped run keeps its exit status
}

}  // namespace
