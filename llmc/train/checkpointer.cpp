#include "llmc/train/checkpointer.h"

#include <nlohmann/json.hpp>
#include <string>

#include "llmc/core/error.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/export_folder.h"
#include "llmc/io/files.h"
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
    if (run.checkpoint && is_of_run(run.checkpoint->directory, run.out_dir))
        last_ = run.checkpoint->directory;
}

fs::path Checkpointer::save_in(const fs::path& folder, const std::optional<Validation>& validation) {
    Trainer& trainer = *run_.trainer;
    run_.session.console().doing("saving", 0);
    trainer.require_finite();
    try {
        return save_checkpoint(folder, run_.identity, run_.lineage, trainer.progress(), to_json(run_.options),
                               to_text(run_.data.record), trainer.algorithms(), trainer.store(),
                               trainer.transfer(), run_.tokenizer_files, validation);
    } catch (const UserError& fault) {
        const bool has_earlier = !last_.empty() || !best_.empty() || run_.checkpoint;
        user_error("{}; make room, and {}", fault.what(),
                   has_earlier ? "continue with --resume: the earlier checkpoints are whole"
                               : "start again: there is no earlier checkpoint");
    }
}

void Checkpointer::save() {
    last_ = save_in(run_.out_dir);
    run_.trainer->saved();
}

void Checkpointer::save_best(double validation_loss) {
    const fs::path folder = run_.out_dir / best_folder;
    best_ = save_in(folder, Validation{validation_loss, run_.validation->fingerprint});
    if (run_.is_rank_zero()) remove_checkpoints(folder, best_);
}

void Checkpointer::export_weights() {
    const fs::path file = link_target(run_.options.export_file);
    if (file.empty()) return;
    try {
        if (run_.is_rank_zero()) make_directory(fs::absolute(file).parent_path());
        run_.trainer->finish_update();
        const ParameterStore& store = run_.trainer->store();
        UnitTransfer& transfer = run_.trainer->transfer();
        if (!is_folder_name(run_.options.export_file)) {
            const std::string dtype = run_.options.export_dtype;
            return save_file(file, store, transfer, dtype.empty() ? "fp32" : dtype);
        }
        save_folder(file, store, transfer,
                    {.config = exported_config(run_.options),
                     .dtype = exported_dtype(run_.options),
                     .tokenizer = with_names_of_folders(run_.tokenizer_files)});
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
