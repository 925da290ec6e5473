#include "llmc/train/prepared_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <exception>
#include <iterator>
#include <sstream>
#include <vector>

#include "llmc/comm/texts_of_ranks.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/data/chat_format.h"
#include "llmc/data/prompt.h"
#include "llmc/data/tokenizer_files.h"
#include "llmc/io/files.h"
#include "llmc/io/model_files.h"
#include "llmc/plan/memory_limit.h"
#include "llmc/train/chat.h"
#include "llmc/train/command_line.h"
#include "llmc/train/folder_options.h"
#include "llmc/train/generate.h"
#include "llmc/train/outputs.h"
#include "llmc/train/report.h"
#include "llmc/train/resume.h"
#include "llmc/train/run_locks.h"
#include "llmc/train/run_spec.h"
#include "llmc/train/same_data.h"
#include "llmc/train/same_options.h"
#include "llmc/train/stop.h"

namespace llmc {

namespace {

// The directory of a process: if several are given, separated by commas, a machine's processes take one each in turn.
std::string drive_of(const std::string& directories, int local_rank) {
    std::vector<std::string> drives;
    std::istringstream names(directories);
    for (std::string name; std::getline(names, name, ',');)
        if (!name.empty()) drives.push_back(name);
    return drives.empty() ? "" : drives[static_cast<std::size_t>(local_rank) % drives.size()];
}

}  // namespace

PreparedRun::~PreparedRun() {
    if (!ranks || !ranks->nccl) return;
    try {
        ranks->nccl->barrier();
    } catch (const std::exception& fault) {
        session.job().fail(fault.what());
    }
}

void PreparedRun::choose_device_and_mesh() {
    session.world().set_timeout(std::chrono::seconds(options.communication_timeout));
    place = open_device(session.options(), session.job());
    options = place.run.options;
    spec = run_spec(options, place.run.mesh, device().sizes());
}

void PreparedRun::plan_memory() {
    HostCommunicator& world = session.world();
    ranks.emplace(open_mesh(options, world, device(), spec));
    staging_bytes = llmc::staging_bytes(world, device());
    spec.machine = free_memory(place, world, session.job().local_size());
    spec.may_exceed_machine = options.steps == 0 && !options.uses_weights();
    plan = plan_run(spec, device().sizes(), staging_bytes);
}

void PreparedRun::open_files() {
    const std::string folder = folder_of_tokenizer(options);
    const char* const asked_by = !options.tokenizer.empty() ? "--tokenizer" : options.chat ? "--chat" : "";
    tokenizer = open_tokenizer(folder, asked_by, model().vocabulary, notes);
    tokenizer_files = tokenizer_files_of(options, folder);
    ends = end_tokens(options, tokenizer_files);
    if (!options.generate) {
        open_data_files();
    }
    // The time is in the name of a new folder in runs/.
    out_dir = broadcast_text(session.world(), choose_out_dir(options).string(), 0);
    prompt = encode_prompt(options.prompt, model().vocabulary, tokenizer_or_none(), begin_token(options));
    open_weights();
    if (comes_late) return;
    if (options.chat) check_chat(*this);
    if (!options.generate) open_training_files();
    if (!tokenizer && model().vocabulary == gpt2_vocabulary && options.sample_tokens > 0)
        notes.push_back(
            fmt::format("samples and --prompt are token ids; for text, {}", advice_for_tokenizer()));
    notes.insert(notes.begin(), options.notes.begin(), options.notes.end());
}

std::span<const std::int32_t> PreparedRun::shown_prompt() const {
    const std::size_t beginning = tokenizer ? tokenizer->beginning().size() : 0;
    return std::span(prompt).subspan(std::min(beginning, prompt.size()));
}

// A plan of a configuration, such as a recipe's, needs none of the data that the configuration names. Nor does
// a plan of any batch need that much of the embedded text.
void PreparedRun::open_data_files() {
    const auto is_typed = [&](const char* name) { return options.given.contains(name); };
    const FoundData found = find_data([&] {
        try {
            data = open_data({.train_data = options.train_data,
                              .val_data = options.val_data,
                              .vocabulary = options.vocabulary(),
                              .sequence_length = options.sequence_length(),
                              .sequences = plan.global_sequences(),
                              .trains = options.steps > 0,
                              .folder = folder_of_tokens(options),
                              .tokenizer = tokenizer ? tokenizer->checksum() : 0,
                              .has_unusable_tokenizer =
                                  !tokenizer && options.folder && !folder_of_tokenizer(options).empty()});
        } catch (const UserError& fault) {
            const bool is_plan = options.steps == 0 && !options.uses_weights();
            const bool lacks_data =
                dynamic_cast<const MissingFile*>(&fault) != nullptr || options.train_data.empty();
            if (!is_plan || !lacks_data || is_typed("train-data") || is_typed("val-data")) throw;
            lack_of_data = fault.what();
        }
        return data.record;
    });
    // A plan goes on without data on all ranks, if one of them has none.
    if (options.steps == 0 && on_any_rank(session.world(), !lack_of_data.empty())) {
        if (!found.fault.empty()) throw UserError(found.fault);
        if (lack_of_data.empty()) lack_of_data = "the files of the data are not on all machines";
    } else {
        require_same_data(session.world(), found);
    }
    if (data.validation) {
        ValidationWindows windows(*data.validation, options.sequence_length());
        const std::int64_t all = windows.windows(), some = options.val_batches * plan.global_sequences();
        const std::int64_t count = some == 0 ? all : std::min(some, all);
        std::string fingerprint = is_rank_zero() ? windows.fingerprint(count) : "";
        validation.emplace(std::move(windows), count, std::move(fingerprint));
    }
}

// From now on the model speaks in the conversations' own template, whatever its folder or its checkpoint has. It lies
// beside the rows, and its format if it has one.
void PreparedRun::take_chat_format() {
    if (data.training->rows().empty()) return;
    const auto folder_of = [](const std::string& file) { return std::filesystem::path(file).parent_path(); };
    const auto beside = [&](const std::filesystem::path& folder, const char* name) {
        return std::filesystem::exists(folder / name) ? read_file(folder / name) : std::string();
    };
    // Files to train on come first.
    const std::span files = std::span(data.files).first(data.training->shards());
    const std::filesystem::path first = folder_of(files.front());
    for (const char* const name : {chat_template_file, chat_format_file}) {
        std::string found = beside(first, name);
        for (const std::string& file : files) {
            if (folder_of(file) != first && beside(folder_of(file), name) != found)
                user_error(
                    "--train-data: '{}' and '{}' are written in different chat templates; train on one after "
                    "the "
                    "other",
                    files.front(), file);
        }
        tokenizer_files.erase(name);
        if (!found.empty()) tokenizer_files[name] = std::move(found);
    }
}

// Finds and checks the weight file. load_weights() reads the weights later.
void PreparedRun::open_weights() {
    checkpoint = find_checkpoint(options, out_dir);
    const std::int64_t step = checkpoint ? checkpoint->progress.step : 0;
    // Another start of the program may have saved a checkpoint after one rank looked for it and before another did.
    if (options.resume_if_any && !is_same_step(session.world(), step))
        comes_late = on_any_rank(session.world(), is_rank_zero() && record_in(out_dir) != earlier_record);
    if (comes_late) return;
    require_same_step(session.world(), step);
    if (options.resume && !checkpoint && !options.resume_if_any) {
        user_error("--resume: {}; {}, or give --resume-if-any", why_none_to_resume(),
                   holds_records(options, out_dir)
                       ? fmt::format("to begin it again, give {}--overwrite instead",
                                     options.out_dir.empty()
                                         ? fmt::format("--out-dir {} ", shell_word(out_dir.string()))
                                         : "")
                       : "leave it out to begin a run");
    }
    if (checkpoint) {
        if (options.takes_newest) note_damage();
        require_same_options(session.world(), &options, true);
        notes_of_resume = differences(*checkpoint, options);
        if (scales_otherwise(*checkpoint, options)) checkpoint->progress.skipped_in_a_row = 0;
        std::ranges::copy(compare_with_checkpoint(data.record, *checkpoint, options),
                          std::back_inserter(notes_of_resume));
    }
    if (!options.init.empty() && (!checkpoint || checkpoint->base)) {
        const CheckedWeights weights = naming_option("--init", [&] {
            return check_weights(find_weights(options.weights), *plan.outline, plan.store.units);
        });
        notes.insert(notes.end(), weights.notes.begin(), weights.notes.end());
        if (!checkpoint) take_dtype(options, weights.dtype);
    }
    if (!options.lora.empty() && !checkpoint)
        naming_option("--lora", [&] {
            check_weights(find_tensors(std::filesystem::path(options.lora) / adapter_weights_file),
                          *plan.outline, plan.store.units, Tensors::adapters);
        });
    if (options.has_adapters() && options.init.empty() && options.uses_weights())
        user_error("--lora-rank adapts a model that is there; give its folder with --init");
}

// A damaged checkpoint that is newer than the one that the run resumes.
void PreparedRun::note_damage() {
    const std::filesystem::path folder =
        options.resume->empty() ? out_dir : directory_of_run(checkpoint->directory);
    for (const std::filesystem::path& of : {folder, folder / best_folder}) {
        const std::string damage = damage_after(of, checkpoint->progress.step, options.damages);
        if (!damage.empty())
            notes.push_back(fmt::format("{}: resuming from {}", damage.substr(0, damage.rfind("; take")),
                                        checkpoint->directory.string()));
    }
}

void PreparedRun::open_training_files() {
    trains = has_steps_to_train(options, checkpoint);
    if (trains) take_chat_format();
    writes = what_is_written(options, out_dir, trains, checkpoint.has_value());
    // Machines may see different files. Rank 0 writes, so it decides.
    for (bool* written : {&writes.checkpoints, &writes.record, &writes.metrics})
        *written = on_any_rank(session.world(), is_rank_zero() && *written);
    identity = new_run_identity();
    lineage = checkpoint ? checkpoint->lineage : identity;
    // With --resume-if-any, a checkpoint may be there to evaluate.
    if (!lack_of_data.empty() && has_given_weights()) user_error("{}", lack_of_data);
    if (!options.eval_hellaswag.empty() && (trains || has_given_weights())) {
        require_same_data(session.world(), find_data([&] {
                              hellaswag.emplace(options.eval_hellaswag, options.eval_examples, model(),
                                                tokenizer_or_none());
                              return DataRecord{{"eval-hellaswag", hellaswag->record()}};
                          }));
    }
    if (!lack_of_data.empty()) notes.push_back(fmt::format("this is only a plan: {}", lack_of_data));
    notes.insert(notes.begin(), data.notes.begin(), data.notes.end());
    if (is_rank_zero()) {
        require_names_for_records();
        require_no_other_run(options, out_dir, writes, checkpoint ? &*checkpoint : nullptr);
        check_outputs(options, out_dir, writes, data.files,
                      saved_bytes(*plan.outline, options.store_dtypes()));
        algorithms = find_algorithms(checkpoint, out_dir, device());
    }
    if (writes.checkpoints) require_shared_directory(session.world(), out_dir);
}

// Records are JSON, which holds UTF-8 only. The texts of the settings are checked where they are given; these names
// may also come from --resume, from the current directory or from a folder in runs/.
void PreparedRun::require_names_for_records() const {
    const auto require = [](const std::filesystem::path& name) {
        if (!is_utf8(name.string()))
            user_error("{}: this name is not valid UTF-8, so no record of a run can hold it; rename it",
                       name.string());
    };
    if (writes.record || writes.metrics) require(out_dir);
    if (writes.record && checkpoint && !is_of_run(checkpoint->directory, out_dir))
        require(plain_path(checkpoint->directory));
}

void PreparedRun::announce() {
    if (options.generate) {
        if (!is_rank_zero()) return;
        for (const std::string& note : notes) say_beside_text("note: " + note);
        return;
    }
    Console& console = session.console();
    console.header(fmt::format("train_gpt {} (commit {})", version(), commit()), header_rows(*this));
    for (const std::string& note : notes) console.note(note);
    if (!plan.lack.empty()) console.note(plan.lack);
    if (trains && plan.lacking_copy > 0) console.note(lack_of_copy(plan.lacking_copy));
    if (trains && options.saves_beside_training() && !options.copies_checkpoints())
        console.note("checkpoints are saved between steps: the optimizer's state is on a disk");
    if (!has_work() && writes.metrics)
        console.note(fmt::format("{} is not written", metrics_file(options, out_dir).string()));
    if (options.verbose) console.text(places_text(plan) + "\n");
}

bool PreparedRun::has_work() const {
    if (!plan.lack.empty() || !lack_of_data.empty()) return false;
    const bool writes_files = writes.record || writes.metrics || !options.export_file.empty();
    return options.generate || trains || has_given_weights() || writes_files;
}

bool PreparedRun::load_weights() {
    HostCommunicator& world = session.world();
    trainer.emplace(options, plan, device(), world, ranks->groups, checkpoint.has_value(),
                    drive_of(options.nvme_dir, session.job().local_rank()));
    if (plan.spec.copies_checkpoints && !trainer->copy()) {
        const StageNeeds& stage = plan.stages.front();
        session.console().note(lack_of_copy(stage.memory.bytes(ArenaKind::checkpoint) +
                                            stage.host.bytes(ArenaKind::checkpoint)));
    }
    if (trainer->store().has_file()) see_disk();
    if (trains) wait_for_disks();
    if (!ranks->nccl) world.set_staging(trainer->arenas()[plan.communication]);
    // From here on, a closed output pipe (Ctrl-C also ends `tee` in a pipe to it) does not kill the program,
    // so that the training is still saved.
    std::signal(SIGPIPE, SIG_IGN);
    if (!resume()) {
        if (!ranks->nccl) world.set_staging({});  // that memory is freed
        return false;
    }
    if (!options.generate) trainer->choose_algorithms(algorithms.earlier, std::ssize(prompt));
    return true;
}

void PreparedRun::see_disk() {
    if (const std::string& note = trainer->store().file().note(); !note.empty()) session.console().note(note);
    // What the run keeps on its disk may have taken the place of checkpoints.
    if (is_rank_zero())
        require_room_for_checkpoints(options, out_dir, writes,
                                     saved_bytes(*plan.outline, options.store_dtypes()));
    const ScratchFile::Speed& speed = trainer->disk_speed();
    if (speed.read > 0) session.console().note(disk_note(plan, speed));
}

// A process that waits for its disk answers nobody. What the slowest disk takes in a step does not count as a silence.
void PreparedRun::wait_for_disks() {
    const Offload& offload = plan.spec.mesh.sharding.offload;
    if (offload.state != Tier::disk && offload.parameters != Tier::disk) return;
    HostCommunicator& world = session.world();
    const ScratchFile::Speed& speed = trainer->disk_speed();
    const double own = speed.read > 0 ? static_cast<double>(plan.moved.read) / speed.read +
                                            static_cast<double>(plan.moved.written) / speed.written
                                      : 0;
    const std::vector<double> seconds = values_of_ranks(world, own);
    world.set_timeout(std::chrono::seconds(options.communication_timeout) +
                          std::chrono::duration<double>(2 * std::ranges::max(seconds)),
                      "if a process may wait for its disk as long, give a longer --comm-timeout");
}

bool PreparedRun::resume() {
    Console& console = session.console();
    if (!options.generate) {
        for (const std::string& note : notes_of_resume) console.note(note);
    }
    if (checkpoint && options.takes_newest) {
        try {
            trainer->resume(*checkpoint);
        } catch (const SharedError& fault) {
            // Damage may look like a file of another kind, or like a fault of the disk.
            const std::string damage = text_of_root(session.world(), [&] {
                const std::string said = fault.what();
                return said.starts_with(damage_prefix) ? said : damage_of(checkpoint->directory);
            });
            if (damage.empty()) throw;
            session.pass_over(checkpoint->directory, damage);
            return false;
        }
    } else if (checkpoint) {
        suggesting_complete_checkpoint(options, out_dir, [&] { trainer->resume(*checkpoint); });
    }
    if (options.generate) return true;
    if (checkpoint) {
        console.note(fmt::format("resuming from {} after step {}", checkpoint->directory.string(),
                                 trainer->progress().step));
    } else if (options.resume) {
        console.note(fmt::format("{}: starting from step 0", why_none_to_resume()));
    }
    return true;
}

std::string PreparedRun::why_none_to_resume() const {
    const std::string folder = (options.out_dir.empty() ? out_dir.parent_path() : out_dir).string();
    return holds_records(options, out_dir) ? fmt::format("the last run in {} saved no checkpoint", folder)
                                           : fmt::format("there is no run in {} to resume", folder);
}

}  // namespace llmc
