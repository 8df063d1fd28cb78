// Calls a kernel on a machine that is emulated: argv[1] names it. Reads how many memories there are, each of them, the
// kernel's arguments, and which of their pointers points where; writes the memories back. All numbers have 64 bits, and
// sizes, in bytes, come before what they are of.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

extern "C" {
void use_threads(void (*)(void (*)(void*), void*, unsigned, unsigned));
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
void attend_along_lines(const void*);
void differentiate_along_lines(const void*);
void context_vectors(const void*);
void differentiate_context_vectors(const void*);
void attend_as_module(const void*);
void convolve_pointwise(const void*);
}

const struct {
    const char* name;
    void (*call)(const void*);
} KERNELS[] = {
    {"attend_along_lines", attend_along_lines},
    {"differentiate_along_lines", differentiate_along_lines},
    {"context_vectors", context_vectors},
    {"differentiate_context_vectors", differentiate_context_vectors},
    {"attend_as_module", attend_as_module},
    {"convolve_pointwise", convolve_pointwise},
};

bool read_number(int64_t& number) { return fread(&number, sizeof number, 1, stdin) == 1; }

std::vector<char> read_bytes() {
    int64_t size = 0;
    if (!read_number(size)) return {};
    std::vector<char> bytes(size);
    if (fread(bytes.data(), 1, size, stdin) != bytes.size()) return {};
    return bytes;
}

int main(int, char** argv) {
    use_threads(GOMP_parallel);
    int64_t count = 0, place, memory, offset;
    if (!read_number(count)) return 1;
    std::vector<std::vector<char>> memories;
    for (int64_t i = 0; i < count; i++) memories.push_back(read_bytes());
    std::vector<char> arguments = read_bytes();
    while (read_number(place) && read_number(memory) && read_number(offset)) {  // place: in the arguments
        char* const pointer = memories[memory].data() + offset;
        memcpy(arguments.data() + place, &pointer, sizeof pointer);
    }
    for (const auto& kernel : KERNELS)
        if (strcmp(kernel.name, argv[1]) == 0) kernel.call(arguments.data());
    for (const auto& memory : memories) fwrite(memory.data(), 1, memory.size(), stdout);
    return fflush(stdout);
}
