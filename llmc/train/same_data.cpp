#include "llmc/train/same_data.h"

#include <fmt/format.h>

#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/train/outputs.h"
#include "llmc/train/same_on_ranks.h"

namespace llmc {

FoundData find_data(const std::function<DataRecord()>& open) {
    try {
        return {.record = open(), .fault = ""};
    } catch (const UserError& fault) {
        return {.record = {}, .fault = fault.what()};
    }
}

void require_same_data(Communicator& world, const FoundData& found) {
    const bool has_data = found.fault.empty();
    for_each_different_rank(
        world, {.text = has_data ? to_text(found.record) : found.fault, .valid = has_data},
        [](const DifferentRank& different) {
            const auto& [rank, has, other, other_has] = different;
            if (!has.valid)
                user_error("rank {} cannot read the data that rank {} reads: {}", rank, other, has.text);
            const std::string what = difference(data_record(has.text), data_record(other_has));
            if (!what.empty())
                user_error("rank {} reads other data than rank {}: {}; give all processes the same files",
                           rank, other, what);
        });
    if (!has_data) throw UserError(found.fault);
}

std::vector<std::string> compare_with_checkpoint(const DataRecord& record, const CheckpointInfo& checkpoint,
                                                 const Options& options) {
    std::vector<std::string> notes;
    if (checkpoint.data.empty()) return notes;
    const DataRecord then = data_record(checkpoint.data);
    const auto difference_of = [&](const std::string& option) {
        const auto here = record.find(option), there = then.find(option);
        return here == record.end() || there == then.end()
                   ? ""
                   : difference(DataRecord{*here}, DataRecord{*there});
    };
    const bool trains = has_steps_to_train(options, checkpoint);
    const auto refuse = [&](const char* use, const std::string& what) {
        user_error("{} {} other data: {}; give the same data, or --new-data to go on with these",
                   checkpoint.directory.string(), use, what);
    };
    if (const std::string what = difference_of("train-data"); !what.empty()) {
        if (trains && !options.new_data) refuse("was trained on", what);
        if (trains)
            notes.push_back(fmt::format("{}; training goes on after {}, in the order of the new data", what,
                                        plural(checkpoint.progress.samples, "sample")));
        else if (options.steps > 0)
            notes.push_back(
                fmt::format("{}; to train on with these, give --new-data and more --steps", what));
    }
    if (const std::string what = difference_of("val-data"); !what.empty()) {
        if (trains && options.keep_best && !options.new_data) refuse("was validated on", what);
        notes.push_back(fmt::format("{}; validation losses before and after are not comparable", what));
    }
    return notes;
}

}  // namespace llmc
