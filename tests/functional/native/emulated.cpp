// Calls a kernel on a machine that is emulated: argv[1] names it. Reads its arguments, then each memory that they point to,
// and writes those memories back. Sizes are in bytes, and come before what they are of.
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
void attend_as_module(const void*);
}

const struct {
    const char* name;
    void (*call)(const void*);
} KERNELS[] = {
    {"attend_along_lines", attend_along_lines},
    {"differentiate_along_lines", differentiate_along_lines},
    {"context_vectors", context_vectors},
    {"attend_as_module", attend_as_module},
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
    std::vector<char> arguments = read_bytes();
    std::vector<std::vector<char>> memories;
    for (int64_t place; read_number(place);) {  // where in the arguments a pointer belongs
        memories.push_back(read_bytes());
        char* const pointer = memories.back().data();
        memcpy(arguments.data() + place, &pointer, sizeof pointer);
    }
    for (const auto& kernel : KERNELS)
        if (strcmp(kernel.name, argv[1]) == 0) kernel.call(arguments.data());
    for (const auto& memory : memories) fwrite(memory.data(), 1, memory.size(), stdout);
    return fflush(stdout);
}
