#include "llmc/train/checkpointer.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/export_folder.h"
#include "llmc/io/files.h"
#include "llmc/train/adapter_options.h"
#include "llmc/train/command_line.h"
#include "llmc/train/folder_options.h"
#include "llmc/train/outputs.h"
#include "llmc/train/resume.h"

namespace llmc {

namespace fs = std::filesystem;

void verify_in_job(Session& session) {
    if (session.is_rank_zero())
        naming_option("--verify-checkpoint",
                      [&] { session.console().text(verified(session.options().verify_checkpoint) + "\n"); });
}

Checkpointer::Checkpointer(PreparedRun& run) : run_(run) {
    if (run.checkpoint && is_of_run(run.checkpoint->directory, run.out_dir)) {
        const CheckpointInfo& from = *run.checkpoint;
        last_ = from.directory;
        previous_ = from.validation ? from.previous : CheckpointLink{from.run, from.progress.step};
    }
    run.trainer->before_errors([this] { settle(); });
    if (!run.is_rank_zero() || !run.writes.checkpoints) return;
    if (run.options.keep_last > 0) kept_ = checkpoints_up_to(run.out_dir, previous_);
    remove_partial_checkpoints(run.out_dir);
    if (!holds_run(run.out_dir / best_folder)) remove_partial_checkpoints(run.out_dir / best_folder);
}

template <class F>
void Checkpointer::advising(const F& f) const {
    try {
        f();
    } catch (const UserError& fault) {
        const bool has_earlier = !last_.empty() || !best_.empty() || run_.checkpoint;
        const std::string_view said = fault.what();
        const bool lacks_room = std::ranges::any_of(std::array{ENOSPC, EDQUOT, EFBIG}, [&](int number) {
            return said.find(std::generic_category().message(number)) != said.npos;
        });
        shared_error("{}; {}{}", said, lacks_room ? "make room, and " : "",
                     has_earlier ? "continue with --resume: the earlier checkpoints are whole"
                                 : "start again: there is no earlier checkpoint");
    }
}

void Checkpointer::save_in(const fs::path& folder, const std::optional<Validation>& validation) {
    Trainer& trainer = *run_.trainer;
    run_.session.console().doing("saving", 0);
    trainer.require_finite();
    finish();
    const bool goes_on = trainer.progress().step < run_.options.steps && !run_.session.is_stopping();
    CheckpointContents contents{.run = run_.identity,
                                .lineage = run_.lineage,
                                .progress = trainer.progress(),
                                .configuration = to_json(run_.options).dump(),
                                .data = to_text(run_.data.record),
                                .device_choices = trainer.algorithms(),
                                .tokenizer = run_.tokenizer_files,
                                .validation = validation,
                                .previous = previous_};
    if (run_.options.has_adapters())
        contents.base = {run_.options.weights.empty() ? "" : fs::absolute(run_.options.weights).string(),
                         trainer.base_checksum()};
    if (goes_on && trainer.copy()) {
        trainer.copy()->take();
        advising([&] {
            pending_.emplace(CheckpointSave(folder, std::move(contents), trainer.store(), trainer.transfer()),
                             *trainer.copy(), run_.session.world());
        });
        return;
    }
    fs::path saved;
    advising(
        [&] { saved = save_checkpoint(folder, std::move(contents), trainer.store(), trainer.transfer()); });
    see_saved(saved, trainer.progress().step, validation.has_value());
}

void Checkpointer::see_saved(const fs::path& checkpoint, std::int64_t step, bool is_best) {
    run_.trainer->saved();
    (is_best ? best_ : last_) = checkpoint;
    // The summary shows the last one.
    if (step < run_.trainer->progress().step || step < run_.options.steps)
        run_.session.console().checkpoint(step, checkpoint.string());
    if (is_best) {
        if (run_.is_rank_zero()) remove_checkpoints(checkpoint.parent_path(), checkpoint);
        return;
    }
    previous_ = {run_.identity, step};
    if (!run_.is_rank_zero() || run_.options.keep_last == 0) return;
    std::erase(kept_, checkpoint);  // it may have replaced one
    kept_.push_back(checkpoint);
    const auto removed = std::max<std::ptrdiff_t>(0, std::ssize(kept_) - run_.options.keep_last);
    std::for_each_n(kept_.begin(), removed, remove_checkpoint);
    kept_.erase(kept_.begin(), kept_.begin() + removed);
}

void Checkpointer::save() { save_in(run_.out_dir); }

void Checkpointer::save_best(double validation_loss) {
    save_in(run_.out_dir / best_folder, Validation{validation_loss, run_.validation->fingerprint});
}

bool Checkpointer::ask_to_stop() {
    if (!pending_) return run_.session.ask_to_stop();
    Session::Done done = pending_->done();
    const bool stops = run_.session.ask_to_stop(done);
    advance_pending([&](BackgroundSave& save) { return save.advance(done); });
    return stops;
}

void Checkpointer::finish() {
    if (!pending_) return;
    advance_pending([](BackgroundSave& save) {
        save.wait();
        return true;
    });
}

template <class F>
void Checkpointer::advance_pending(const F& f) {
    bool is_complete = false;
    try {
        advising([&] { is_complete = f(*pending_); });
    } catch (const UserError&) {
        pending_.reset();
        throw;
    }
    if (!is_complete) return;
    const fs::path saved = pending_->of().path();
    const CheckpointContents& contents = pending_->of().contents();
    const std::int64_t step = contents.progress.step;
    const bool is_best = contents.validation.has_value();
    pending_.reset();
    see_saved(saved, step, is_best);
}

void Checkpointer::finish_after(const UserError& fault) {
    const bool is_shared = dynamic_cast<const SharedError*>(&fault) != nullptr;
    if (is_shared || run_.session.world().size() == 1) settle();
}

void Checkpointer::settle() {
    try {
        finish();
    } catch (const UserError&) {
        // The other error ends the run.
    }
}

void Checkpointer::export_weights() {
    const fs::path file = link_target(run_.options.export_file);
    if (file.empty()) return;
    try {
        if (run_.is_rank_zero()) make_directory(fs::absolute(file).parent_path());
        run_.trainer->finish_update();
        const ParameterStore& store = run_.trainer->store();
        UnitTransfer& transfer = run_.trainer->transfer();
        const Options& options = run_.options;
        const bool are_adapters = options.has_adapters() && options.merge.empty();
        Collected what;
        if (are_adapters) what.tensors = Tensors::adapters;
        std::optional<StoredTensors> originals;
        if (!options.merge.empty()) {
            originals.emplace(find_weights(options.weights));
            what = {.merged = options.adapters().scale(),
                    .originals = &*originals,
                    .keeps_nf4 = options.merge == "trained"};
        }
        if (!is_folder_name(options.export_file)) {
            const std::string dtype = options.export_dtype;
            return save_file(file, store, transfer, what, dtype.empty() ? "fp32" : dtype);
        }
        ExportedFolder folder{
            .config = are_adapters ? exported_adapter_config(options) : exported_config(options),
            .dtype = are_adapters ? "fp32" : exported_dtype(options),
            .what = what,
            .tokenizer = with_names_of_folders(run_.tokenizer_files)};
        if (are_adapters) {
            const bool is_as_it_came = !options.lora.empty() && options.steps == 0;
            const std::string base_dtype = is_as_it_came                ? options.dtype_of_base
                                           : options.base_dtype.empty() ? options.dtype
                                                                        : options.base_dtype;
            folder.metadata = {{base_checksum_key, run_.trainer->base_checksum()}};
            if (!base_dtype.empty()) folder.metadata.emplace(base_dtype_key, base_dtype);
        }
        if (what.merged) {
            const bool is_in_nf4 = !options.base_dtype.empty() && what.keeps_nf4;
            folder.metadata = {{"merged_into", is_in_nf4 ? "weights in nf4" : "original weights"}};
            if (!options.base_dtype.empty())
                run_.session.console().note(fmt::format(
                    "the adapters are merged into {}",
                    is_in_nf4 ? "the weights in 4 bits with which this run computes"
                              : "the weights of the files, which are others than those beside which they "
                                "were trained"));
        }
        save_folder(file, store, transfer, folder);
        const auto& source = run_.options.folder;
        if (source && run_.tokenizer_files.empty() && !fs::exists(source->path))
            run_.session.console().note(
                fmt::format("{} is gone, so {} has no tokenizer", source->path, file.string()));
    } catch (const UserError& fault) {
        const std::string command = command_to_export(run_, last_);
        if (command.empty()) throw;
        user_error("{}; the rest of the run is complete; to export its checkpoint: {}", fault.what(),
                   command);
    }
}

}  // namespace llmc
