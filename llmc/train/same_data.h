// Refuses a run whose data are not the same everywhere: on all ranks, and before and after it was resumed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/data/data_record.h"
#include "llmc/io/checkpoint.h"
#include "llmc/train/options.h"

namespace llmc {

// The result of opening data on a rank.
struct FoundData {
    DataRecord record;
    std::string fault;  // the line of the UserError that opening them threw; empty if there was none
};

// Calls `open` and returns what it returns, or the line of the UserError that it throws.
FoundData find_data(const std::function<DataRecord()>& open);

// Throws a UserError if a rank did not find the data, or finds other data than most ranks do. The error names
// that rank and what differs. All ranks call it and throw together, so that none waits for another.
void require_same_data(Communicator& world, const FoundData& found);

// Compares the data of a run with those of its checkpoint. If the run trains on, throws a UserError if the samples
// are others, or, with --keep-best, the validation data, unless --new-data allows it. Returns notes about other
// differences. A checkpoint without a record of its data is compared with nothing.
std::vector<std::string> compare_with_checkpoint(const DataRecord& record, const CheckpointInfo& checkpoint,
                                                 const Options& options);

}  // namespace llmc
