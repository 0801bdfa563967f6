// A team of threads that run one loop together and then wait for the next.
//
// An update is a loop of a few milliseconds, and often the next follows at once. To wake a sleeping thread costs tens of
// microseconds, on a virtual machine more, and there are many to wake. So whoever has finished looks out for the next loop for a
// while before it sleeps, where the machine has cores to spare. A loop is cut into grains that threads take as they come free, and
// it has ended when its grains have: a thread that woke late, or has lost its core, holds nobody up.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

class Team {
  public:
    // The process's own. It is never destroyed, since its threads are not; a fork has no threads and gets a new one.
    static Team& get() {
        static const int registered = pthread_atfork(nullptr, nullptr, [] { current() = new Team; });
        (void)registered;
        return *current();
    }

    // Calls work(grain) once for each grain in [0, grains), on the caller and up to threads - 1 others.
    void run(int threads, int64_t grains, std::function<void(int64_t)> work) {
        const std::lock_guard<std::mutex> one_at_a_time(running_);
        const auto loop = std::make_shared<Loop>();
        loop->work = std::move(work), loop->grains = grains, loop->helpers = int(std::min<int64_t>(threads, grains)) - 1;
        patient_ = threads < available_cores();
        for (int number = int(members_.size()); number < loop->helpers; ++number) {
            std::thread made([this, number] { member(number); });
            members_.push_back(made.native_handle());
            made.detach();
            place(number);
        }
        if (loop->helpers > 0) {
            {
                const std::lock_guard<std::mutex> nobody_falls_asleep(sleeping_);
                loop_ = loop;
                turn_.fetch_add(1, std::memory_order_release);
            }
            wake_.notify_all();
        }
        take(*loop);
        for (int looks = 0; loop->done.load(std::memory_order_acquire) < grains; ++looks) rest(looks);
    }

    // Member i stays on cores[i] from now on; on none in particular where the list ends.
    void bind(const int* cores, int count) {
        const std::lock_guard<std::mutex> one_at_a_time(running_);
        cores_.assign(cores, cores + count);
        for (int number = 0; number < int(members_.size()); ++number) place(number);
    }

  private:
    struct Loop {
        std::function<void(int64_t)> work;
        int64_t grains;
        int helpers;
        std::atomic<int64_t> next{0}, done{0};
    };

    static Team*& current() {
        static Team* team = new Team;
        return team;
    }

    static int available_cores() {
        cpu_set_t set;
        return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    }

    static void take(Loop& loop) {
        for (int64_t grain; (grain = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.grains;) {
            loop.work(grain);
            loop.done.fetch_add(1, std::memory_order_release);
        }
    }

    // Between two looks: a pause, and now and then the core for whoever else wants it.
    static void rest(int looks) {
        if (looks % 64 == 63) std::this_thread::yield();
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }

    void member(int number) {
        for (uint64_t seen = 0;;) {
            const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(patient_ ? 300 : 0);
            for (int looks = 0; turn_.load(std::memory_order_acquire) == seen; ++looks) {
                if (looks % 64 == 0 && std::chrono::steady_clock::now() >= until) break;
                rest(looks);
            }
            std::shared_ptr<Loop> loop;
            {
                std::unique_lock<std::mutex> lock(sleeping_);
                wake_.wait(lock, [&] { return turn_.load(std::memory_order_relaxed) != seen; });
                seen = turn_.load(std::memory_order_relaxed);
                loop = loop_;
            }
            if (number < loop->helpers) take(*loop);
        }
    }

    void place(int number) {
        cpu_set_t set;
        CPU_ZERO(&set);
        if (number < int(cores_.size())) CPU_SET(cores_[number], &set);
        else if (sched_getaffinity(0, sizeof set, &set) != 0) return;
        pthread_setaffinity_np(members_[number], sizeof set, &set);  // where it is refused, threads go where they like
    }

    std::mutex running_, sleeping_;
    std::condition_variable wake_;
    std::atomic<uint64_t> turn_{0};
    std::atomic<bool> patient_{false};
    std::shared_ptr<Loop> loop_;
    std::vector<pthread_t> members_;
    std::vector<int> cores_;
};
