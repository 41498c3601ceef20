// What the static C++ runtime of a recent GCC takes from glibc 2.32 to 2.35, so that a wheel also runs on older ones.
// The library never throws, so that nothing has to be found for unwinding.

#include <pthread.h>

#define LOWBIT_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

LOWBIT_HIDDEN char __libc_single_threaded = 0;

LOWBIT_HIDDEN int _dl_find_object(void*, void*) { return -1; }

// The runtime initializes its locales by it.
LOWBIT_HIDDEN int pthread_once(pthread_once_t* once, void (*run)()) {
  int unset = 0;
  if (__atomic_compare_exchange_n(once, &unset, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
    run();
    __atomic_store_n(once, 2, __ATOMIC_RELEASE);
  }
  while (__atomic_load_n(once, __ATOMIC_ACQUIRE) != 2) {
  }
  return 0;
}

// Only its address is used: whether there are threads.
LOWBIT_HIDDEN int __pthread_key_create(pthread_key_t*, void (*)(void*)) { return 1; }
}
