// Reads and writes the safetensors format (safetensors.h).
#include "llmc/io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <system_error>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/foreign_files.h"

namespace llmc {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

// The format's own limit, so that a damaged length does not request all memory.
constexpr std::uint64_t largest_header = 100'000'000;

std::string count(std::uint64_t bytes) { return plural(static_cast<std::int64_t>(bytes), "byte"); }

// Elements may be at any address in a file, so they are copied out rather than pointed at.
template <class Stored, class T, class Convert>
void convert(std::span<const std::byte> bytes, std::span<T> out, Convert convert) {
    for (std::size_t i = 0; i < out.size(); ++i) {
        Stored stored;
        std::memcpy(&stored, bytes.data() + i * sizeof(Stored), sizeof(Stored));
        out[i] = static_cast<T>(convert(stored));
    }
}

template <class T>
void convert(std::string_view dtype, std::span<const std::byte> bytes, std::span<T> out) {
    const auto same = [](auto x) { return x; };
    if (dtype == "F64") convert<double>(bytes, out, same);
    if (dtype == "F32") convert<float>(bytes, out, same);
    if (dtype == "F16") convert<float16>(bytes, out, [](float16 x) { return to_float(x); });
    if (dtype == "BF16") convert<bfloat16>(bytes, out, [](bfloat16 x) { return to_float(x); });
}

// Whether a value is a nonnegative JSON integer that fits in int64: a dimension or an offset.
bool is_size(const json& value) {
    return value.is_number_unsigned() &&
           value.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max();
}

// Refuses two things that the parser accepts and the format forbids: a repeated key (the last would win), and
// nesting deeper than {name: {shape: [...]}}.
json parse_json(std::string_view header) {
    std::map<int, std::set<std::string>> keys;
    const auto inspect = [&](int depth, json::parse_event_t event, json& parsed) {
        if (depth > 3) throw std::runtime_error("it is nested too deeply");
        if (event == json::parse_event_t::object_start) keys[depth + 1].clear();
        if (event == json::parse_event_t::key && !keys[depth].insert(parsed.get<std::string>()).second)
            throw std::runtime_error(in_quotes(parsed.get<std::string>()) + " occurs twice");
        return true;
    };
    return json::parse(header.begin(), header.end(), inspect);
}

Shape parse_shape(const json& sizes) {
    const auto d = [&](std::size_t i) { return sizes[i].get<std::int64_t>(); };
    switch (sizes.size()) {
        case 0:
            return {};
        case 1:
            return {d(0)};
        case 2:
            return {d(0), d(1)};
        case 3:
            return {d(0), d(1), d(2)};
        case 4:
            return {d(0), d(1), d(2), d(3)};
        default:
            return {d(0), d(1), d(2), d(3), d(4)};
    }
}

struct Parsed {
    SafetensorsEntry entry;
    std::uint64_t begin, end;
};

// Parses one tensor's entry of the header. Throws a runtime_error that says what is wrong with it.
Parsed parse_entry(const std::string& name, const json& value) {
    const auto require = [](bool condition, const char* what) {
        if (!condition) throw std::runtime_error(what);
    };
    require(value.is_object() && value.contains("dtype") && value.contains("shape") &&
                value.contains("data_offsets"),
            "needs dtype, shape and data_offsets");
    const json &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
    require(dtype.is_string() && element_bytes(dtype.get<std::string>()) > 0, "its dtype is unknown");
    require(shape.is_array() && std::all_of(shape.begin(), shape.end(), is_size),
            "its shape is not a list of sizes");
    require(shape.size() <= 5, "it has more than the 5 dimensions that this program handles");
    require(offsets.is_array() && offsets.size() == 2 && is_size(offsets[0]) && is_size(offsets[1]),
            "its data_offsets are not two offsets");

    auto bytes = static_cast<std::int64_t>(element_bytes(dtype.get<std::string>()));
    for (const json& size : shape)
        require(!__builtin_mul_overflow(bytes, size.get<std::int64_t>(), &bytes), "its shape is too large");
    const auto begin = offsets[0].get<std::uint64_t>(), end = offsets[1].get<std::uint64_t>();
    require(begin <= end && end - begin == static_cast<std::uint64_t>(bytes),
            "its data_offsets do not match its shape");
    return {{name, dtype.get<std::string>(), parse_shape(shape)}, begin, end};
}

}  // namespace

std::uint64_t element_bytes(std::string_view dtype) {
    static const std::map<std::string_view, std::uint64_t> sizes = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
        {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},
        {"I32", 4},  {"F32", 4}, {"U64", 8}, {"I64", 8},     {"F64", 8}};
    const auto found = sizes.find(dtype);
    return found == sizes.end() ? 0 : found->second;
}

bool is_number_dtype(std::string_view dtype) {
    constexpr std::array<std::string_view, 4> numbers = {"F64", "F32", "F16", "BF16"};
    return std::ranges::find(numbers, dtype) != numbers.end();
}

void to_floats(std::string_view dtype, std::span<const std::byte> bytes, std::span<float> out) {
    convert(dtype, bytes, out);
}

std::string in_quotes(const std::string& text) {
    const std::string line = json(text).dump(-1, ' ', true, json::error_handler_t::replace);
    return line.size() <= 100 ? line : line.substr(0, 100) + "...\"";
}

std::uint64_t SafetensorsEntry::bytes() const {
    return static_cast<std::uint64_t>(shape.elements()) * element_bytes(dtype);
}

// ---- reading

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path) : path_(path.string()), file_(path) {
    if (!file_.is_regular()) user_error("{} is not a file; give a .safetensors file", path_);
    std::uint64_t header_bytes = 0;
    if (file_bytes() < sizeof(header_bytes))
        user_error("{} is not a safetensors file: it has only {}", path_, count(file_bytes()));
    file_.read_at(0, std::as_writable_bytes(std::span(&header_bytes, 1)));
    refuse_foreign_file(header_bytes, file_bytes());
    if (header_bytes > file_bytes() - sizeof(header_bytes))
        user_error(
            "{} is truncated or not a safetensors file: its header would have {} bytes, but the file has "
            "{}",
            path_, header_bytes, file_bytes());
    data_begin_ = sizeof(header_bytes) + header_bytes;

    std::string header(header_bytes, ' ');
    file_.read_at(sizeof(header_bytes), std::as_writable_bytes(std::span(header)));
    parse_header(header, file_bytes() - data_begin_);
}

// The first bytes of most other files would be the length of an absurd header. A header begins with a brace.
void SafetensorsReader::refuse_foreign_file(std::uint64_t header_bytes, std::uint64_t file_bytes) const {
    std::string beginning(std::min<std::uint64_t>(file_bytes, bytes_to_recognize), ' ');
    file_.read_at(0, std::as_writable_bytes(std::span(beginning)));
    const bool is_absurd = header_bytes > largest_header;
    if (!is_absurd && beginning.substr(sizeof(header_bytes)).starts_with('{')) return;
    const std::string foreign = recognize_foreign_file(beginning);
    if (!foreign.empty()) user_error("{} is {}", path_, foreign);
    if (is_absurd)
        user_error(
            "{} is not a safetensors file: it does not begin with the length of a header; give a "
            ".safetensors file",
            path_);
}

void SafetensorsReader::parse_header(std::string_view header, std::uint64_t data_bytes) {
    json root;
    try {
        root = parse_json(header);
    } catch (const json::parse_error& error) {
        user_error("{} is damaged or not a safetensors file: its header is not JSON at byte {}", path_,
                   error.byte);
    } catch (const std::exception& error) {
        user_error("{} is damaged or not a safetensors file: its header: {}", path_, error.what());
    }
    if (!root.is_object()) user_error("{}: the header is not a JSON object", path_);

    std::vector<Parsed> tensors;
    for (const auto& [name, value] : root.items()) {
        if (name == "__metadata__") {
            if (!value.is_object()) user_error("{}: __metadata__ is not a JSON object of strings", path_);
            for (const auto& [key, text] : value.items()) {
                if (!text.is_string())
                    user_error("{}: __metadata__: {} is not a string", path_, in_quotes(key));
                metadata_[key] = text.get<std::string>();
            }
            continue;
        }
        try {
            tensors.push_back(parse_entry(name, value));
        } catch (const std::runtime_error& error) {
            user_error("{}: tensor {}: {}", path_, in_quotes(name), error.what());
        }
    }

    // The data must be covered without overlap or gap. An empty tensor sorts before the one that begins at
    // the same offset.
    std::sort(tensors.begin(), tensors.end(), [](const Parsed& a, const Parsed& b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::uint64_t covered = 0;
    for (Parsed& tensor : tensors) {
        if (tensor.begin != covered)
            user_error("{}: tensor {}: its data begin at {}, but the tensor before it ends at {}", path_,
                       in_quotes(tensor.entry.name), tensor.begin, covered);
        if (tensor.end > data_bytes)
            user_error(
                "{}: tensor {}: its data end at {}, but the file holds only {} of data: it is truncated",
                path_, in_quotes(tensor.entry.name), tensor.end, count(data_bytes));
        covered = tensor.end;
        index_[tensor.entry.name] = entries_.size();
        offsets_.push_back(tensor.begin);
        entries_.push_back(std::move(tensor.entry));
    }
    if (covered != data_bytes)
        user_error("{}: the tensors have {}, but the file holds {} of data", path_, count(covered),
                   count(data_bytes));
}

std::size_t SafetensorsReader::find(std::string_view name) const {
    const auto found = index_.find(name);
    if (found == index_.end()) user_error("{}: there is no tensor {}", path_, in_quotes(std::string(name)));
    return found->second;
}

const SafetensorsEntry& SafetensorsReader::entry(std::string_view name) const { return entries_[find(name)]; }

void SafetensorsReader::read(std::string_view name, std::span<float> out) const { read_converted(name, out); }
void SafetensorsReader::read(std::string_view name, std::span<double> out) const {
    read_converted(name, out);
}

void SafetensorsReader::read(std::string_view name, std::span<std::byte> out) const {
    const std::size_t i = find(name);
    check(out.size() == entries_[i].bytes(), "the memory has the size of the tensor");
    file_.read_at(data_begin_ + offsets_[i], out);
}

template <class T>
void SafetensorsReader::read_converted(std::string_view name, std::span<T> out) const {
    const std::size_t i = find(name);
    const std::string& dtype = entries_[i].dtype;
    check(out.size() == static_cast<std::size_t>(entries_[i].shape.elements()),
          "the memory has the size of the tensor");
    if (!is_number_dtype(dtype))
        user_error("{}: tensor {} has the dtype {}; it must be F64, F32, F16 or BF16", path_,
                   in_quotes(std::string(name)), dtype);

    const std::uint64_t stride = element_bytes(dtype);
    std::vector<std::byte> piece(std::min<std::size_t>(out.size() * stride, 1 << 20));
    const std::size_t piece_elements = piece.size() / stride;
    for (std::size_t first = 0; first < out.size(); first += piece_elements) {
        const std::size_t count = std::min(piece_elements, out.size() - first);
        const auto bytes = std::span(piece).first(count * stride);
        file_.read_at(data_begin_ + offsets_[i] + first * stride, bytes);
        convert(dtype, bytes, out.subspan(first, count));
    }
}

// ---- writing

std::string safetensors_header(std::span<const SafetensorsEntry> entries,
                               const std::map<std::string, std::string>& metadata) {
    nlohmann::ordered_json header;
    header["__metadata__"] = metadata;
    header["__metadata__"]["format"] = "pt";
    std::uint64_t offset = 0;
    for (const SafetensorsEntry& entry : entries) {
        check(element_bytes(entry.dtype) > 0, "a tensor that is written has a known dtype");
        check(!header.contains(entry.name), "each tensor has its own name");
        auto sizes = nlohmann::ordered_json::array();
        for (int i = 0; i < entry.shape.dimensions(); ++i) sizes.push_back(entry.shape[i]);
        header[entry.name] = {
            {"dtype", entry.dtype}, {"shape", sizes}, {"data_offsets", {offset, offset + entry.bytes()}}};
        offset += entry.bytes();
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the elements in a mapping of the file
    const std::uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, std::vector<SafetensorsEntry> entries,
                                     const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)), partial_path_(path_.string() + ".partial"), entries_(std::move(entries)) {
    const std::string header = safetensors_header(entries_, metadata);
    file_.emplace(partial_path_, path_);
    try {
        file_->write(header);
    } catch (const UserError&) {
        std::error_code ignored;
        std::filesystem::remove(partial_path_, ignored);
        throw;
    }
    skip_finished();
}

SafetensorsWriter::~SafetensorsWriter() {
    if (finished_) return;
    file_.reset();
    std::error_code ignored;
    std::filesystem::remove(partial_path_, ignored);
}

void SafetensorsWriter::append(std::string_view name, std::span<const std::byte> bytes) {
    check(current_ < entries_.size() && entries_[current_].name == name,
          "tensors are written in the order of the table");
    check(bytes.size() <= entries_[current_].bytes() - written_, "no more bytes than the tensor has");
    file_->write(bytes);
    written_ += bytes.size();
    skip_finished();
}

void SafetensorsWriter::finish(bool sync) {
    check(current_ == entries_.size(), "all tensors are written before a file is finished");
    if (sync) file_->sync();
    file_->close();
    std::error_code error;
    std::filesystem::rename(partial_path_, path_, error);
    if (error) user_error("cannot write {}: {}", path_.string(), error.message());
    finished_ = true;
    if (sync) sync_directory(path_.parent_path());
}

void SafetensorsWriter::skip_finished() {
    while (current_ < entries_.size() && written_ == entries_[current_].bytes()) {
        ++current_;
        written_ = 0;
    }
}

}  // namespace llmc
