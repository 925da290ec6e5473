#include "llmc/train/checkpointer.h"

#include <nlohmann/json.hpp>
#include <string>

#include "llmc/core/error.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/files.h"
#include "llmc/io/model_files.h"
#include "llmc/train/command_line.h"

namespace llmc {

namespace fs = std::filesystem;

Checkpointer::Checkpointer(PreparedRun& run) : run_(run) {
    if (run.checkpoint && plain_path(run.checkpoint->directory).parent_path() == plain_path(run.out_dir))
        last_ = run.checkpoint->directory;
}

fs::path Checkpointer::save_in(const fs::path& folder) {
    Trainer& trainer = *run_.trainer;
    run_.session.console().doing("saving", 0);
    trainer.require_finite();
    return save_checkpoint(folder, run_.identity, run_.lineage, trainer.progress(), to_json(run_.options),
                           trainer.algorithms(), trainer.store(), trainer.transfer());
}

void Checkpointer::save() {
    last_ = save_in(run_.out_dir);
    run_.trainer->saved();
}

void Checkpointer::save_best() {
    const fs::path folder = run_.out_dir / best_folder;
    best_ = save_in(folder);
    if (run_.is_rank_zero()) remove_checkpoints(folder, best_);
}

void Checkpointer::export_weights() {
    const fs::path file = run_.options.export_file;
    if (file.empty()) return;
    try {
        if (run_.is_rank_zero()) make_directory(fs::absolute(file).parent_path());
        save_weights(file.string(), run_.trainer->store(), run_.trainer->transfer(), false);
    } catch (const UserError& fault) {
        const std::string command = command_to_export(run_, last_);
        if (command.empty()) throw;
        user_error("{}; the rest of the run is complete; to export its checkpoint: {}", fault.what(),
                   command);
    }
}

}  // namespace llmc
