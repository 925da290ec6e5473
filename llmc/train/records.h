// The files that a run writes about itself: metrics.jsonl, a line for each step; run.json and config.toml,
// what was run; the algorithms that its GPUs chose. Only rank 0 writes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "llmc/io/metrics.h"
#include "llmc/train/prepared_run.h"
#include "llmc/train/run_locks.h"

namespace llmc {

// Parts of the record of a run, which a plan prints too.
nlohmann::ordered_json mesh_record(const Mesh& mesh);
nlohmann::ordered_json sent_record(const BytesSent& sent);
nlohmann::ordered_json memory_record(const ArenaSizes& memory);
// What a rank offloads: bytes in the host's memory and on a disk, and those that a step moves.
nlohmann::ordered_json offload_record(const StageNeeds& needs);

// Creates the directory of a new run without --out-dir. Removes it again if it is still empty.
class ClaimedDirectory {
  public:
    // If another run already has run.out_dir, changes run.out_dir and prints a note.
    explicit ClaimedDirectory(PreparedRun& run);
    ~ClaimedDirectory();
    ClaimedDirectory(const ClaimedDirectory&) = delete;
    ClaimedDirectory& operator=(const ClaimedDirectory&) = delete;

  private:
    std::filesystem::path directory_;  // empty: none was claimed
};

class Records {
  public:
    // Creates the files. UserError if they cannot be written.
    explicit Records(PreparedRun& run);

    // If the metrics cannot be written, the run goes on, and a note says so once.
    void write(const StepMetrics& step);
    // UserError if some of its lines are still missing in the end.
    void require_written();

    // The validations in the metrics file of the resumed run, and whether its last step still lacks a due
    // validation or HellaSwag score. Empty and false except on rank 0.
    std::vector<MetricsWriter::Validation> earlier_validations() const;
    bool lacks_validation() const { return metrics_ && metrics_->lacks_validation(); }
    bool lacks_hellaswag() const { return metrics_ && metrics_->lacks_hellaswag(); }
    void add_validation(double loss);
    void add_hellaswag(const HellaSwagScore& score);
    // One line of a run that does not train.
    void write_evaluation(std::int64_t step, std::int64_t tokens, const std::optional<double>& val_loss,
                          const std::optional<HellaSwagScore>& hellaswag);

    // The folder for pictures of the run; none on ranks that do not write.
    std::optional<std::filesystem::path> folder() const;

  private:
    PreparedRun& run_;
    ClaimedDirectory claimed_;
    RunLocks own_folder_lock_;
    std::optional<MetricsWriter> metrics_;
    bool misses_lines_ = false;
};

}  // namespace llmc
