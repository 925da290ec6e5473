#include "llmc/train/records.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/core/version.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/files.h"
#include "llmc/train/report.h"

namespace llmc {

namespace fs = std::filesystem;

nlohmann::ordered_json mesh_record(const Mesh& mesh) {
    return {{"world", mesh.world()},
            {"pipeline", mesh.pipeline},
            {"data", mesh.data_ranks()},
            {"tensor", mesh.tensor},
            {"zero_stage", mesh.sharding.stage},
            {"shards", mesh.sharding.shards},
            {"replicas", mesh.sharding.replicas}};
}

nlohmann::ordered_json sent_record(const BytesSent& sent) {
    return {{"inside", sent.inside},
            {"across", sent.across},
            {"tied", sent.tied},
            {"stages", sent.stages},
            {"tensor", sent.tensor}};
}

nlohmann::ordered_json memory_record(const ArenaSizes& memory) {
    nlohmann::ordered_json record;
    for (const ArenaKind kind : all_arenas) record[std::string(name_of(kind))] = memory.bytes(kind);
    return record;
}

nlohmann::ordered_json offload_record(const StageNeeds& needs) {
    return {{"host", needs.host.total_bytes()},   {"disk", needs.disk},
            {"to_device", needs.moved.to_device}, {"from_device", needs.moved.from_device},
            {"read", needs.moved.read},           {"written", needs.moved.written}};
}

namespace {

nlohmann::ordered_json pipeline_record(const RunPlan& plan) {
    nlohmann::ordered_json record = {{"schedule", name_of(plan.pipeline.schedule)},
                                     {"stages", plan.pipeline.stages},
                                     {"virtual_stages", plan.pipeline.virtual_stages}};
    for (int chunk = 0; chunk < plan.pipeline.chunks(); ++chunk)
        record["layers"].push_back(plan.chunk(chunk).layers());
    for (const StageNeeds& stage : plan.stages) {
        record["memory"].push_back(memory_record(stage.memory));
        record["bytes_sent"].push_back(sent_record(stage.sent));
        record["offload"].push_back(offload_record(stage));
    }
    return record;
}

RunRecord record_of_start(const PreparedRun& run) {
    RunRecord record;
    record.identity = run.identity;
    if (!run.checkpoint) return record;
    record.began_from = record.branched_from = run.checkpoint->directory;
    if (is_of_run(record.began_from, run.out_dir)) {
        const std::optional<RunRecord> last = read_last_run(run.out_dir);
        record.branched_from = last ? last->branched_from : fs::path();
    }
    return record;
}

// The first line of the metrics: what is run, and how.
nlohmann::ordered_json run_record(const PreparedRun& run) {
    nlohmann::ordered_json record = {
        {"program", "train_gpt"},
        {"version", version()},
        {"commit", commit()},
        {"identity", run.lineage},
        {"configuration", to_json(run.options)},
        {"device", run.device().description()},
        {"mesh", mesh_record(run.plan.spec.mesh)},
        {"parameters", count_parameters(run.plan.spec.model)},
        {"trained_parameters", count_parameters(run.plan.spec.model, true)},
        {"micro_batch_sequences", run.plan.micro_batch},
        {"micro_batches", run.plan.micro_batches},
        {"bytes_sent", sent_record(run.plan.sent)},
        {"memory", memory_record(run.plan.memory.sizes())},
        {"offload", offload_record(run.plan.stages[static_cast<std::size_t>(run.plan.spec.mesh.stage())])},
    };
    if (run.plan.pipeline.chunks() > 1) record["pipeline"] = pipeline_record(run.plan);
    if (run.validation) record["validation_windows"] = run.validation->fingerprint;
    if (run.data.unigram_loss) record["unigram_loss"] = *run.data.unigram_loss;
    if (run.data.source_entropy) record["source_entropy"] = *run.data.source_entropy;
    return record;
}

}  // namespace

ClaimedDirectory::ClaimedDirectory(PreparedRun& run) {
    const Options& options = run.options;
    if (!run.is_rank_zero() || !options.out_dir.empty() || options.resume || !run.trains) return;
    directory_ = claim_directory(run.out_dir);
    if (directory_ == run.out_dir) return;
    run.session.console().note(fmt::format("results go to {}", directory_.string()));
    run.out_dir = directory_;
}

ClaimedDirectory::~ClaimedDirectory() {
    if (directory_.empty()) return;
    // fs::remove removes only empty directories.
    std::error_code ignored;
    fs::remove(directory_, ignored);
    fs::remove(directory_.parent_path(), ignored);
}

Records::Records(PreparedRun& run) : run_(run), claimed_(run) {
    own_folder_lock_.lock_own_folder(run);
    const Options& options = run.options;
    Console& console = run.session.console();
    if (!run.trains && run.checkpoint && holds_records(options, run.out_dir))
        console.note(records_stay(options, run.out_dir, run.writes));
    if (!run.is_rank_zero()) return;
    const std::string& chosen = run.trainer->algorithms();
    const std::int64_t added = keep_algorithms(run.algorithms, chosen, run.identity);
    if (added > 0 && !run.algorithms.origin.empty())
        console.note(fmt::format("{} autotuned now, because no earlier run had chosen them",
                                 plural(added, "algorithm")));
    if (const auto [failing, varying] = run.trainer->left_out(); failing + varying > 0)
        console.note(fmt::format(
            "cuBLASLt's algorithms that failed: {}, that gave other bits each time: {}; they are left out",
            failing, varying));
    std::optional<ReplacedRun> replaced;
    if (options.overwrite && run.writes.record) replaced.emplace(run.out_dir);
    // The metrics come first: if they cannot be written, nothing is.
    if (run.writes.metrics) {
        metrics_.emplace(metrics_file(options, run.out_dir), run_record(run), run.trainer->progress().step);
    }
    if (metrics_ && !metrics_->moved_to().empty())
        console.note(fmt::format("the metrics of another run are kept as {}", metrics_->moved_to().string()));
    if (!run.writes.record) return;
    make_directory(run.out_dir);
    write_last_run(run.out_dir, record_of_start(run));
    write_file(run.out_dir / "config.toml", to_toml(options));
    if (!chosen.empty()) write_file(run.out_dir / algorithms_file, chosen);
    if (replaced) replaced->remove();
}

void Records::write(const StepMetrics& step) {
    if (!metrics_) return;
    metrics_->write(step);
    const bool misses_lines = !metrics_->failure().empty();
    if (misses_lines && !misses_lines_)
        run_.session.console().note(fmt::format(
            "{}; the run goes on, and writes the missing lines when it can", metrics_->failure()));
    misses_lines_ = misses_lines;
}

void Records::require_written() {
    if (metrics_) metrics_->write_kept();
    if (metrics_ && !metrics_->failure().empty())
        user_error("{}; its last lines are missing, but the run is complete and saved", metrics_->failure());
}

std::vector<MetricsWriter::Validation> Records::earlier_validations() const {
    return metrics_ ? metrics_->earlier_validations() : std::vector<MetricsWriter::Validation>();
}

void Records::add_validation(double loss) {
    if (metrics_) metrics_->add_validation(loss);
}

void Records::add_hellaswag(const HellaSwagScore& score) {
    if (metrics_) metrics_->add_hellaswag(score);
}

void Records::write_evaluation(std::int64_t step, std::int64_t tokens, const std::optional<double>& val_loss,
                               const std::optional<HellaSwagScore>& hellaswag) {
    if (metrics_) metrics_->write_evaluation(step, tokens, val_loss, hellaswag);
}

std::optional<fs::path> Records::folder() const {
    return run_.is_rank_zero() && run_.writes.record ? std::optional(run_.out_dir) : std::nullopt;
}

}  // namespace llmc
