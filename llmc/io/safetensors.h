// Files of named tensors in the safetensors format, in which models are exchanged with Hugging Face's tools:
//
//   8 bytes   n, little-endian
//   n bytes   JSON {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//             "__metadata__": {"key": "value", ...}}, padded with spaces
//   the rest  the elements of every tensor, row-major and little-endian; offsets count from here
//
// The reader trusts nothing it reads: whatever the bytes of a file are, it either gives tensors that lie
// inside the file, without overlap or gap, or throws a UserError that names the file and the tensor. The
// format has no checksum: a damaged element is not detected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/tensor.h"

namespace llmc {

// A text from a file for use in a message: in quotation marks, on one line, in ASCII, not endless.
std::string in_quotes(const std::string& text);

// One tensor of a file. `dtype` is the format's name of it: F64, F32, F16, BF16, I64, I32, I16, I8, U64, ...,
// BOOL.
struct SafetensorsEntry {
    std::string name;
    std::string dtype;
    Shape shape;

    std::uint64_t bytes() const;
};

class SafetensorsReader {
  public:
    // Opens the file and checks all of its header. UserError if it cannot be read or is not whole.
    explicit SafetensorsReader(const std::filesystem::path& path);
    ~SafetensorsReader();
    SafetensorsReader(const SafetensorsReader&) = delete;
    SafetensorsReader& operator=(const SafetensorsReader&) = delete;

    const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in the order of their data
    const std::map<std::string, std::string>& metadata() const { return metadata_; }

    bool contains(std::string_view name) const { return index_.contains(name); }
    // UserError if there is no such tensor.
    const SafetensorsEntry& entry(std::string_view name) const;

    // The elements of an F64, F32, F16 or BF16 tensor as float or double; `out` has exactly their number.
    // Values beyond float's range become infinite. UserError for another dtype or if the file is shorter now
    // than when it was opened.
    void read(std::string_view name, std::span<float> out) const;
    void read(std::string_view name, std::span<double> out) const;
    // The bytes of a tensor of any dtype; `out` has exactly their number.
    void read(std::string_view name, std::span<std::byte> out) const;

  private:
    std::size_t find(std::string_view name) const;
    void parse_header(std::string_view header, std::uint64_t data_bytes);
    template <class T>
    void read_converted(std::string_view name, std::span<T> out) const;
    void read_at(std::uint64_t position, std::span<std::byte> out) const;

    std::string path_;
    int file_ = -1;
    std::uint64_t data_begin_ = 0;  // place of the first element's first byte in the file
    std::vector<SafetensorsEntry> entries_;
    std::vector<std::uint64_t> offsets_;  // of each entry's data, from data_begin_
    std::map<std::string, std::size_t, std::less<>> index_;
    std::map<std::string, std::string> metadata_;
};

// Writes a file in one pass, so that a model need not be in memory a second time: the table of tensors first,
// then their bytes in the order of the table. The file has the name `path` only when it is whole.
class SafetensorsWriter {
  public:
    // The metadata is written with {"format": "pt"} added, without which Hugging Face's loader refuses a
    // file. UserError if the file cannot be created.
    SafetensorsWriter(std::filesystem::path path, std::vector<SafetensorsEntry> entries,
                      const std::map<std::string, std::string>& metadata = {});
    ~SafetensorsWriter();  // an unfinished file is removed
    SafetensorsWriter(const SafetensorsWriter&) = delete;
    SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

    // The next bytes of the table's next unfinished tensor, which `name` must be. A tensor may come in
    // pieces. UserError with the system's reason if they cannot be written.
    void append(std::string_view name, std::span<const std::byte> bytes);

    // To be called when all tensors are written. With `sync` it returns only when the file and its name are
    // on the storage device.
    void finish(bool sync = false);

  private:
    struct Close {
        void operator()(std::FILE* file) const { std::fclose(file); }
    };
    [[noreturn]] void fail() const;
    void write(std::span<const std::byte> bytes);
    void skip_finished();

    std::filesystem::path path_;
    std::filesystem::path partial_path_;
    std::vector<SafetensorsEntry> entries_;
    std::size_t current_ = 0;    // entry that the next bytes belong to
    std::uint64_t written_ = 0;  // bytes of it written so far
    std::unique_ptr<std::FILE, Close> file_;
    bool finished_ = false;
};

}  // namespace llmc
