// Files of named tensors in the safetensors format, the exchange format of Hugging Face's tools:
//
//   8 bytes   n, little-endian
//   n bytes   JSON {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//             "__metadata__": {"key": "value", ...}}, padded with spaces
//   the rest  the elements of every tensor, row-major and little-endian; offsets count from here
//
// The reader validates everything. For any bytes, it either gives tensors that lie inside the file, without
// overlap or gap, or throws a UserError that names the file and the tensor. The format has no checksum, so a
// damaged element is not detected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/tensor.h"
#include "llmc/io/files.h"

namespace llmc {

// A text from a file, for a message: in quotation marks, on one line, in ASCII, shortened.
std::string in_quotes(const std::string& text);

// One tensor of a file. `dtype` is its name in the format: F64, F32, F16, BF16, I64, I32, I16, I8, U64, ...,
// BOOL.
struct SafetensorsEntry {
    std::string name;
    std::string dtype;
    Shape shape;

    std::uint64_t bytes() const;
};

// Bytes of an element of this dtype; 0 if the format has none of this name.
std::uint64_t element_bytes(std::string_view dtype);
// Whether numbers of this dtype can be read as float, and their conversion. Values beyond float's range become
// infinite.
bool is_number_dtype(std::string_view dtype);
void to_floats(std::string_view dtype, std::span<const std::byte> bytes, std::span<float> out);

// The beginning of a file with these tensors, up to their elements. {"format": "pt"} is added to the metadata, because
// Hugging Face's loader refuses files without it.
std::string safetensors_header(std::span<const SafetensorsEntry> entries,
                               const std::map<std::string, std::string>& metadata = {});

class SafetensorsReader {
  public:
    // Opens the file and checks its whole header. UserError if it cannot be read or is not complete.
    explicit SafetensorsReader(const std::filesystem::path& path);

    const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in the order of their data
    const std::map<std::string, std::string>& metadata() const { return metadata_; }

    bool contains(std::string_view name) const { return index_.contains(name); }
    // UserError if there is no such tensor.
    const SafetensorsEntry& entry(std::string_view name) const;
    // Where its elements begin in the file, and the size of the file, in bytes.
    std::uint64_t position(std::string_view name) const { return data_begin_ + offsets_[find(name)]; }
    std::uint64_t file_bytes() const { return file_.bytes(); }

    // Reads the elements of an F64, F32, F16 or BF16 tensor as float or double; `out` must have exactly that
    // size. Values beyond float's range become infinite. UserError for another dtype, or if the file has
    // become shorter since it was opened.
    void read(std::string_view name, std::span<float> out) const;
    void read(std::string_view name, std::span<double> out) const;
    // Reads the bytes of a tensor of any dtype; `out` must have exactly that size.
    void read(std::string_view name, std::span<std::byte> out) const;

  private:
    std::size_t find(std::string_view name) const;
    void refuse_foreign_file(std::uint64_t header_bytes, std::uint64_t file_bytes) const;
    void parse_header(std::string_view header, std::uint64_t data_bytes);
    template <class T>
    void read_converted(std::string_view name, std::span<T> out) const;

    std::string path_;
    InputFile file_;
    std::uint64_t data_begin_ = 0;  // position of the first element's first byte in the file
    std::vector<SafetensorsEntry> entries_;
    std::vector<std::uint64_t> offsets_;  // positions of the entries' data, counted from data_begin_
    std::map<std::string, std::size_t, std::less<>> index_;
    std::map<std::string, std::string> metadata_;
};

// Writes a file in one pass, so that the model need not be in memory twice: first the table of tensors, then
// their bytes in the order of the table. The file gets the name `path` only when it is whole.
class SafetensorsWriter {
  public:
    // UserError if the file cannot be created.
    SafetensorsWriter(std::filesystem::path path, std::vector<SafetensorsEntry> entries,
                      const std::map<std::string, std::string>& metadata = {});
    ~SafetensorsWriter();  // an unfinished file is removed
    SafetensorsWriter(const SafetensorsWriter&) = delete;
    SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

    // Appends bytes to the next unfinished tensor of the table, which must be `name`. A tensor may come in
    // pieces. UserError with the system's reason if they cannot be written.
    void append(std::string_view name, std::span<const std::byte> bytes);

    // Call it when all tensors are written. With `sync` it returns only when the file and its name are on the
    // storage device.
    void finish(bool sync = false);

  private:
    void skip_finished();

    std::filesystem::path path_;
    std::filesystem::path partial_path_;
    std::vector<SafetensorsEntry> entries_;
    std::size_t current_ = 0;    // entry that the next bytes belong to
    std::uint64_t written_ = 0;  // bytes of that entry written so far
    std::optional<OutputFile> file_;
    bool finished_ = false;
};

}  // namespace llmc
