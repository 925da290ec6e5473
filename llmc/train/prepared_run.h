// A run before its first step: everything that training, evaluation and generation have in common. Each
// function below is one stage of the preparation, and train_gpt.cu calls them in turn. A mistake of the user
// is a UserError of the earliest stage that can know it: nothing is computed or written for such a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/data/data.h"
#include "llmc/data/tokenizer.h"
#include "llmc/io/checkpoint.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/algorithms.h"
#include "llmc/train/devices.h"
#include "llmc/train/hellaswag.h"
#include "llmc/train/outputs.h"
#include "llmc/train/session.h"
#include "llmc/train/trainer.h"

namespace llmc {

struct PreparedRun {
    // The session outlives it.
    explicit PreparedRun(Session& of) : session(of), options(of.options()) {}
    PreparedRun(const PreparedRun&) = delete;
    PreparedRun& operator=(const PreparedRun&) = delete;
    // Waits for the other ranks, which may still need this rank's part of NCCL's communicators.
    ~PreparedRun();

    // Chooses this rank's device and its coordinates in the mesh, and with them the configuration of the run.
    void choose_device_and_mesh();
    // Opens the communicators, makes the lists of actions and plans the memory. Allocates no memory for the
    // model yet.
    void plan_memory();
    // Opens the data or encodes the prompt, finds the checkpoint to resume, and chooses the output files.
    // Writes nothing.
    void open_files();
    // Prints the header and the notes.
    void announce();
    // Whether there is anything to train, evaluate, generate or write, and the memory and the data for it.
    bool has_work() const;
    // Allocates the memory and sets the weights: from the seed, from --init, or from the checkpoint. False if that is
    // damaged and --resume may take another one: then the run must be prepared again.
    bool load_weights();

    // Whether the weights come from a file. Weights initialised from the seed are not evaluated before
    // training.
    bool has_given_weights() const { return checkpoint || !options.init.empty(); }
    bool is_rank_zero() const { return session.is_rank_zero(); }
    Device& device() const { return *place.device; }
    const Model& model() const { return plan.spec.model; }
    // The tokens of the prompt that are shown: those that the tokenizer puts before every text are not.
    std::span<const std::int32_t> shown_prompt() const;
    const Tokenizer* tokenizer_or_none() const { return tokenizer ? &*tokenizer : nullptr; }

    Session& session;
    Options options;  // constant after open_files()

    // The run.json in the folder of results, as it was before this start looked there (run_locks.h).
    std::string earlier_record;
    // Whether another start has gone on with the run since then, as open_files() found.
    bool comes_late = false;

    // choose_device_and_mesh
    Place place;
    RunSpec spec;

    // plan_memory
    std::optional<MeshRanks> ranks;  // none where only a plan is asked for
    std::size_t staging_bytes = 0;   // memory that the communicator needs on the host
    RunPlan plan;

    // open_files
    Data data;
    // The first `count` windows, which a validation evaluates; none without such data. Rank 0 has the fingerprint.
    struct ValidationSet {
        ValidationWindows windows;
        std::int64_t count;
        std::string fingerprint;
    };
    std::optional<ValidationSet> validation;
    // The error, if a plan goes on without `data`; otherwise empty.
    std::string lack_of_data;
    std::filesystem::path out_dir;
    // The identity of this run (io/checkpoint.h).
    std::string identity;
    // The identity of the first run in the chain of resumed runs; this run's own if it resumes none.
    std::string lineage;
    // The checkpoint that this run resumes.
    std::optional<CheckpointInfo> checkpoint;
    // If false, the run only evaluates the weights. Not used with --generate.
    bool trains = true;
    Writes writes;
    Algorithms algorithms;
    std::optional<Tokenizer> tokenizer;  // none if there are no files of one
    TokenizerFiles tokenizer_files;      // which checkpoints and exports keep
    std::vector<std::int32_t> ends;      // tokens that end a text
    std::vector<std::int32_t> prompt;    // tokens that samples continue
    std::optional<HellaSwag> hellaswag;
    std::vector<std::string> notes, notes_of_resume;

    // load_weights
    std::optional<Trainer> trainer;

  private:
    void open_weights();
    void open_data_files();
    void take_chat_format();
    void open_training_files();
    void require_names_for_records() const;
    void see_disk();
    void wait_for_disks();
    bool resume();
    void note_damage();
    // Why find_checkpoint found nothing.
    std::string why_none_to_resume() const;
};

}  // namespace llmc
