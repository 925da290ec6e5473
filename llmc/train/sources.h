// What the options of a run name in files: the checkpoint of --resume, the weights of --init, the folders of models.
// find_sources() looks them up; what follows from them is computed without files (completed(), options.h).
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "llmc/io/adapter_files.h"
#include "llmc/io/checkpoint.h"
#include "llmc/train/options.h"

namespace llmc {

// A folder in Hugging Face's format.
struct ModelFolder {
    std::string name;    // as it was given
    std::string path;    // absolute: a run may go on in another directory
    std::string config;  // the text of its config.json
};

struct Sources {
    // For Options::out_dir and Options::resume: --config and --resume may name the directory of a run.
    std::string out_dir;
    std::optional<std::string> resume;

    std::optional<CheckpointInfo> checkpoint;  // of --resume
    bool takes_newest = false;                 // --resume names none, so that it is the newest of a run
    std::string results;                       // the directory of the run that goes on
    // The settings that the configuration of the checkpoint's run gave.
    std::set<std::string, std::less<>> given_then;

    std::string weights;  // of --init: a file, a folder, or a checkpoint's directory
    std::optional<CheckpointInfo> init_checkpoint;         // --init DIR of a checkpoint or of a run
    std::optional<ModelFolder> init_folder, model_folder;  // --init DIR, --model DIR

    std::optional<AdapterFolder> adapter;  // of --lora
    std::string base;                      // the folder of its base

    std::vector<std::string> notes;
};

// UserError if a name leads nowhere.
Sources find_sources(const Options& options);

}  // namespace llmc
