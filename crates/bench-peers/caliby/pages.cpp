// Caliby's buffer pool as a pool of pages for `vellum bench page-reads`.
//
// Caliby 0.1.3 is the published product of Calico (arXiv 2604.00423). Its pool finds pages by
// a table in their state words. It needs libaio and Abseil (Debian: libaio-dev, libabsl-dev). Its
// pages have 16 KiB; one constant makes that 4 KiB, as Vellum has. In a folder outside of the
// repository ($VELLUM):
//
//     pip download --no-binary caliby --no-deps caliby==0.1.3 && tar xf caliby-0.1.3.tar.gz
//     sed -i 's/pageSize = 4096 \* 4/pageSize = 4096/' caliby-0.1.3/include/caliby/calico.hpp
//     g++ -std=c++20 -O3 -march=native -DNDEBUG -DCALICO_SPECIALIZATION_CALICO -fPIC -shared \
//         -I caliby-0.1.3/include/caliby -I caliby-0.1.3/src -I caliby-0.1.3/third_party \
//         $VELLUM/crates/bench-peers/caliby/pages.cpp -o caliby-pages.so \
//         -laio -labsl_raw_hash_set -labsl_hash -labsl_city -labsl_low_level_hash
//     VELLUM_PAGE_POOL=$PWD/caliby-pages.so vellum bench page-reads
//
// This is one translation unit with the pool, so that the compiler can inline what a hit needs.

#include "calico.cpp"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

namespace {

// A new thread for each pool: Caliby keeps the place of its page states in each thread, and does
// not notice that a later pool has other ones.
template <class Work>
int in_new_thread(Work work) {
    int result = -1;
    std::thread([&] {
        try {
            work();
            result = 0;
        } catch (const std::exception& error) {
            std::fprintf(stderr, "caliby: %s\n", error.what());
        }
    }).join();
    return result;
}

}  // namespace

extern "C" const char* page_pool_name() { return "caliby"; }

extern "C" int page_pool_open(const char* path, uint64_t pool_bytes, uint64_t data_bytes) {
    char gigabytes[64];
    setenv("BLOCK", path, 1);
    std::snprintf(gigabytes, sizeof gigabytes, "%.9f", double(pool_bytes) / double(1ull << 30));
    setenv("PHYSGB", gigabytes, 1);
    // It takes whole numbers here, at least as many as for the pool.
    uint64_t larger = std::max(pool_bytes, data_bytes);
    std::snprintf(gigabytes, sizeof gigabytes, "%llu",
                  (unsigned long long)((larger >> 30) + 1));
    setenv("VIRTGB", gigabytes, 1);
    return in_new_thread([] {
        if (bm_ptr) throw std::runtime_error("one pool at a time");
        bm_ptr = new BufferManager();
    });
}

// Eight bytes of each page, by an optimistic read.
extern "C" int page_pool_read(const uint64_t* pages, const uint64_t* offsets, uint64_t* words,
                              size_t count) {
    IndexTranslationArray* array = bm_ptr->getIndexArray(0);
    for (size_t at = 0; at < count; at++) {
        for (;;) {
            try {
                GuardO<char> guard(pages[at], array);
                words[at] = *reinterpret_cast<volatile const uint64_t*>(guard.ptr + offsets[at]);
                guard.release();
                break;
            } catch (const OLCRestartException&) {
                continue;
            } catch (const std::exception& error) {
                std::fprintf(stderr, "caliby: page %llu: %s\n", (unsigned long long)pages[at],
                             error.what());
                return -1;
            }
        }
    }
    return 0;
}

extern "C" int page_pool_close() {
    return in_new_thread([] {
        // It leaves the file open and its memory mapped; the file would keep the disk mounted.
        close(bm_ptr->blockfd);
        munmap(bm_ptr->frameMem, bm_ptr->physCount * sizeof(Page));
        delete bm_ptr;
        bm_ptr = nullptr;
    });
}
