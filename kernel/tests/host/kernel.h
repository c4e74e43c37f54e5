/* SPDX-License-Identifier: GPL-2.0 */
/*
 * As much of the kernel as core/frames*.c asks for, in a program: so that the pool of frames can be
 * run at full speed, by real threads, under a sanitizer.
 *
 * Frame n is page n of one large array; no pool has page 0, as 0 means no frame.
 */
#ifndef VELLUM_HOST_KERNEL_H
#define VELLUM_HOST_KERNEL_H

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef uint64_t u64;
typedef int64_t s64;
typedef uint32_t u32;

#define PAGE_SIZE		4096
#define likely(x)		__builtin_expect(!!(x), 1)
#define unlikely(x)		__builtin_expect(!!(x), 0)
#define noinline		__attribute__((noinline))
#define ____cacheline_aligned_in_smp __attribute__((aligned(64)))
#define READ_ONCE(x)		__atomic_load_n(&(x), __ATOMIC_RELAXED)
#define WRITE_ONCE(x, v)	__atomic_store_n(&(x), (v), __ATOMIC_RELAXED)
#define swap(a, b)		do { typeof(a) swapped = (a); (a) = (b); (b) = swapped; } while (0)
#define max_t(type, a, b)	((type)(a) > (type)(b) ? (type)(a) : (type)(b))
#define min_t(type, a, b)	((type)(a) < (type)(b) ? (type)(a) : (type)(b))
#define clamp_t(type, v, low, high) min_t(type, max_t(type, v, low), high)

typedef struct { s64 value; } atomic64_t;
#define atomic64_read(a)	__atomic_load_n(&(a)->value, __ATOMIC_RELAXED)
#define atomic64_set(a, v)	__atomic_store_n(&(a)->value, (v), __ATOMIC_RELAXED)
#define atomic64_set_release(a, v) __atomic_store_n(&(a)->value, (v), __ATOMIC_RELEASE)
#define atomic64_xchg(a, v)	__atomic_exchange_n(&(a)->value, (v), __ATOMIC_SEQ_CST)
#define atomic64_inc_return(a)	__atomic_add_fetch(&(a)->value, 1, __ATOMIC_SEQ_CST)
#define atomic64_dec(a)		__atomic_sub_fetch(&(a)->value, 1, __ATOMIC_SEQ_CST)

typedef struct { int value; } atomic_t;
#define atomic_read(a)		__atomic_load_n(&(a)->value, __ATOMIC_ACQUIRE)
#define atomic_set(a, v)	__atomic_store_n(&(a)->value, (v), __ATOMIC_RELAXED)

/* What others do between a look and the exchange, once; and others often run there. */
extern void (*host_meanwhile)(void);

static inline void host_pause(void)
{
	static __thread u32 calls;
	void (*meanwhile)(void) = __atomic_load_n(&host_meanwhile, __ATOMIC_RELAXED);

	if (meanwhile) {
		__atomic_store_n(&host_meanwhile, NULL, __ATOMIC_RELAXED);
		meanwhile();
	}
	if (++calls % 64 == 0)
		usleep(200);
}

#define atomic64_try_cmpxchg(a, old, new) \
	(host_pause(), \
	 __atomic_compare_exchange_n(&(a)->value, (old), (s64)(new), false, __ATOMIC_SEQ_CST, \
				     __ATOMIC_SEQ_CST))

typedef struct { pthread_mutex_t mutex; } spinlock_t;
#define spin_lock_init(l)	pthread_mutex_init(&(l)->mutex, NULL)
#define spin_lock(l)		pthread_mutex_lock(&(l)->mutex)
#define spin_unlock(l)		pthread_mutex_unlock(&(l)->mutex)

struct list_head { struct list_head *next, *prev; };

static inline void INIT_LIST_HEAD(struct list_head *list)
{
	list->next = list->prev = list;
}

static inline void list_add(struct list_head *node, struct list_head *list)
{
	node->next = list->next;
	node->prev = list;
	list->next->prev = node;
	list->next = node;
}

static inline void list_del(struct list_head *node)
{
	node->next->prev = node->prev;
	node->prev->next = node->next;
}

static inline void list_move(struct list_head *node, struct list_head *list)
{
	list_del(node);
	list_add(node, list);
}

static inline void list_splice_init(struct list_head *from, struct list_head *to)
{
	while (from->next != from)
		list_move(from->next, to);
}

#define list_entry(node, type, member) \
	((type *)((char *)(node) - offsetof(type, member)))
#define list_for_each_entry_safe(entry, after, list, member) \
	for (entry = list_entry((list)->next, typeof(*entry), member), \
	     after = list_entry(entry->member.next, typeof(*entry), member); \
	     &entry->member != (list); \
	     entry = after, after = list_entry(entry->member.next, typeof(*entry), member))

struct page {
	struct list_head	lru;
	u64			private;
	int			references;
};

extern struct page host_pages[];
extern char host_memory[][PAGE_SIZE];
struct page *host_alloc_page(void);
struct page *host_alloc_pages(unsigned int order);
void host_put_page(struct page *page);

#define GFP_KERNEL_ACCOUNT	0
#define __GFP_ZERO		0
#define __GFP_RETRY_MAYFAIL	0
#define __GFP_NOWARN		0
#define alloc_page(flags)	host_alloc_page()
#define alloc_pages(flags, order) host_alloc_pages(order)
#define split_page(page, order)	do { } while (0)
#define put_page(page)		host_put_page(page)
#define page_to_pfn(page)	((u64)((page) - host_pages))
#define pfn_to_page(frame)	(&host_pages[frame])
#define page_address(page)	((void *)host_memory[page_to_pfn(page)])
#define virt_to_page(memory) \
	(&host_pages[((char *)(memory) - (char *)host_memory) / PAGE_SIZE])
#define page_ref_count(page)	__atomic_load_n(&(page)->references, __ATOMIC_RELAXED)
#define page_private(page)	READ_ONCE((page)->private)
#define set_page_private(page, v) WRITE_ONCE((page)->private, (v))

#define kvcalloc(count, size, flags) host_calloc((count), (size))
#define kvfree(memory)		free(memory)

static inline void *host_calloc(size_t count, size_t size)
{
	void *memory = aligned_alloc(64, (count * size + 63) & ~63ULL);

	return memory ? memset(memory, 0, count * size) : NULL;
}

/* Loads are not reordered where this runs; the sanitizer knows no fences. */
#define smp_rmb()		__asm__ volatile("" ::: "memory")
#define preempt_disable()	do { } while (0)
#define preempt_enable()	do { } while (0)
#define cond_resched()		sched_yield()
#define usleep_range(low, high)	usleep(low)
struct task { unsigned int flags; };
#define current			(&(struct task){})
#define PF_MEMALLOC		0x800
#define fatal_signal_pending(task) false

static inline u32 get_random_u32(void)
{
	static __thread u32 state = 1;

	state = state * 1664525 + 1013904223;
	return state >> 8;
}

#endif /* VELLUM_HOST_KERNEL_H */
