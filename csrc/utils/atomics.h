/* atomics.h: the few atomic operations the engine needs, over the compiler's builtins (C99 has none of its own).
 *
 * Objects are plain integers or pointers; one that is reached from two threads is touched through these only. */
#ifndef COLIBRI_ATOMICS_H
#define COLIBRI_ATOMICS_H

#if !defined(__GNUC__)
#error "atomics.h needs the __atomic builtins of GCC or Clang"
#endif

#define atomic_load_acquire(object) __atomic_load_n(object, __ATOMIC_ACQUIRE)
#define atomic_store_release(object, value) __atomic_store_n(object, value, __ATOMIC_RELEASE)
/* In one order for all threads: who adds to one object and then loads another sees the other's addition, or is seen by it. */
#define atomic_add(object, value) __atomic_add_fetch(object, value, __ATOMIC_SEQ_CST) /* returns the new value */
#define atomic_load(object) __atomic_load_n(object, __ATOMIC_SEQ_CST)

#define atomic_exchange(object, value) __atomic_exchange_n(object, value, __ATOMIC_ACQ_REL)       /* returns the old value */

/* Whether the object had the value `old`; then it has `new` now. */
#define atomic_exchange_if(object, old, new)                                                                                     \
    __atomic_compare_exchange_n(object, &(__typeof__(*(object))){old}, new, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)

/* Tells the CPU that this thread only waits. */
static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
