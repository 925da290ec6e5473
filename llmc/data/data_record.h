// A record of the data that a run reads. Two records are compared: those of two ranks, whose machines may hold
// other files, or those of a checkpoint and of the run that resumes it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace llmc {

struct FileRecord {
    std::string name;         // without its directory: the same files may be elsewhere
    std::int64_t bytes = 0;   // the size of the whole file
    std::int64_t tokens = 0;  // the tokens that are read from it; a text may be divided
    std::string ends;         // a checksum of its first and last bytes
};

// The files that one option names, in the order in which they are read, and the number of samples that they
// give.
struct OptionRecord {
    std::vector<FileRecord> files;
    std::int64_t samples = 0;
};

// By the name of the option without dashes: "train-data".
using DataRecord = std::map<std::string, OptionRecord>;

// `path` may be any name; its directory is left out. The checksum covers 64 KiB at both ends, because a
// dataset may have more bytes than can be read before each start. This includes the header of a token shard.
FileRecord record_of(const std::string& path, std::span<const std::uint8_t> bytes, std::int64_t tokens);

// As one line of JSON, and back.
std::string to_text(const DataRecord& record);
DataRecord data_record(const std::string& text);

// Says how the data here differ from the others: "train_000002.bin is missing". Empty if they give the same
// samples, whatever the names of the files.
std::string difference(const OptionRecord& here, const OptionRecord& others);

// The first difference, after the name of its option: "--train-data: train_000002.bin is missing".
std::string difference(const DataRecord& here, const DataRecord& others);

}  // namespace llmc
