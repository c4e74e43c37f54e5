// SPDX-License-Identifier: GPL-2.0
/*
 * The descriptor as a proxy of the backing file (SIGMOD 2023, 4.3). pread and preadv bring pages
 * that are not there to the surface and read them. pwrite and pwritev write pages. The buffers are
 * parts of the surface, and their place says which part of the file is meant. So the offset is free
 * to name the interface, and a vector is scattered in the file as it is on the surface.
 *
 *	offset = interface | opcode << 8
 *
 * With the opcode ALLOC, pread and preadv bring pages and read nothing. exmap_published.h says what
 * the calls return.
 */

#include <linux/fs.h>
#include <linux/llist.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uio.h>
#include <linux/workqueue.h>
#include <vellum/exmap_published.h>

#include "core/compat.h"
#include "exmap/exmap.h"
#include "exmap/transfer.h"

/* The segments of a call, or as many of them as an interface has room for. */
struct exmap_segments {
	unsigned int		count;
	struct exmap_range	*ranges;
	struct exmap_result	*results;
};

int exmap_find_range(const struct exmap *exmap, unsigned long address, size_t length,
		     struct exmap_range *range)
{
	unsigned long start = exmap->mount.start;

	if (address < start || !PAGE_ALIGNED(address | length) ||
	    length >> PAGE_SHIFT > UINT_MAX)
		return -EINVAL;
	range->page = (address - start) >> PAGE_SHIFT;
	range->count = length >> PAGE_SHIFT;
	if (range->page >= exmap->tree.pages)
		return -EINVAL;
	return range->count <= exmap->tree.pages - range->page ? 0 : -EFAULT;
}

/*
 * Reads the next segments as pages of the surface, up to one that is not whole pages of it. Returns
 * the error of that one.
 */
static int exmap_read_segments(struct exmap *exmap, struct iov_iter *iter,
			       struct exmap_segments *segments, unsigned int most)
{
	int error = 0;
	size_t length;

	segments->count = 0;
	while (iov_iter_count(iter) && segments->count < most) {
		length = vellum_iter_length(iter);
		if (length)
			error = exmap_find_range(exmap, (unsigned long)vellum_iter_address(iter),
						 length, &segments->ranges[segments->count]);
		if (error)
			break;
		segments->count += length != 0;
		/* An empty segment is passed over as well. */
		iov_iter_advance(iter, length);
	}
	return error;
}

/*
 * Counts the bytes of the segments before the first that did not come as a whole, and of that
 * segment's pages before the first that failed, if that is known. Returns the segment's error if
 * there are none.
 */
static ssize_t exmap_bytes_done(const struct exmap_segments *segments, bool has_gap)
{
	const struct exmap_result *result = segments->results;
	ssize_t bytes = 0;
	unsigned int i;

	for (i = 0; i < segments->count; i++, result++) {
		if (!result->error && result->pages == segments->ranges[i].count) {
			bytes += (ssize_t)result->pages << PAGE_SHIFT;
			continue;
		}
		if (result->error && !has_gap)
			bytes += (ssize_t)result->pages << PAGE_SHIFT;
		return bytes ?: result->error;
	}
	return bytes;
}

/* A call that returned before it was carried out. */
struct exmap_async {
	struct exmap_transfer_batch	batch;
	struct exmap_segments		segments;
	struct kiocb		*kiocb;
	struct mm_struct	*mm;		/* NULL: not needed */
	struct llist_node	node;
	struct exmap_range	ranges[];	/* followed by the results */
};

static void exmap_async_answer(struct exmap_async *call)
{
	struct kiocb *kiocb = call->kiocb;
	ssize_t outcome = exmap_bytes_done(&call->segments, call->batch.has_gap);

	kfree(call);
	/* The exmap may be gone after this. */
	kiocb->ki_complete(kiocb, outcome);
}

/* Concludes the calls that have finished by now. */
void exmap_conclude(struct work_struct *work)
{
	struct exmap_interface *interface = container_of(work, struct exmap_interface, concluding);
	struct exmap_async *call, *next;
	struct llist_node *calls;

	mutex_lock(&interface->lock);
	calls = llist_reverse_order(llist_del_all(&interface->finished));
	llist_for_each_entry(call, calls, node)
		exmap_transfer_conclude(&call->batch, call->mm);
	mutex_unlock(&interface->lock);
	llist_for_each_entry_safe(call, next, calls, node) {
		if (call->mm)
			mmdrop(call->mm);
		exmap_async_answer(call);
	}
}

static void exmap_async_finished(struct exmap_transfer_batch *batch)
{
	struct exmap_async *call = container_of(batch, struct exmap_async, batch);
	struct exmap *exmap = batch->exmap;
	struct exmap_interface *interface = &exmap->interface[batch->index];

	if (exmap_transfer_conclude_quickly(batch))
		exmap_async_answer(call);
	else if (llist_add(&call->node, &interface->finished))
		queue_work(exmap->work, &interface->concluding);
}

static void exmap_proxy_plan(struct exmap_transfer_batch *batch, struct exmap *exmap,
			     unsigned int index, u64 opcode, struct exmap_segments *segments)
{
	if (opcode == EXMAP_PUBLISHED_OP_READ)
		segments->count = exmap_transfer_plan_new(batch, exmap, index, segments->ranges,
							  segments->results, segments->count);
	else
		exmap_transfer_plan(batch, exmap, index, opcode == EXMAP_PUBLISHED_OP_WRITE ?
				    TRANSFER_WRITE : TRANSFER_REFRESH, segments->ranges,
				    segments->results, segments->count);
}

/* Starts a read, and does not wait for it. */
static ssize_t exmap_async_read(struct exmap *exmap, unsigned int index, u64 opcode,
				struct kiocb *kiocb, struct iov_iter *iter)
{
	unsigned int most = iter_is_iovec(iter) ? iter->nr_segs : 1;
	struct exmap_async *call;
	int error;

	call = kmalloc(sizeof(*call) + most * (sizeof(*call->ranges) + sizeof(struct exmap_result)),
		       GFP_KERNEL_ACCOUNT);
	if (!call)
		return -ENOMEM;
	call->segments.ranges = call->ranges;
	call->segments.results = (struct exmap_result *)(call->ranges + most);
	error = exmap_read_segments(exmap, iter, &call->segments, most);
	if (!call->segments.count) {
		kfree(call);
		return error;
	}
	call->kiocb = kiocb;
	call->mm = exmap->zero_leaf ? current->mm : NULL;
	if (call->mm)
		mmgrab(call->mm);
	exmap_proxy_plan(&call->batch, exmap, index, opcode, &call->segments);
	exmap_transfer_start(&call->batch, exmap_async_finished);
	return -EIOCBQUEUED;
}

/* Allocates up to the first segment that was not there as a whole before, and is now. */
static ssize_t exmap_proxy_alloc(struct exmap *exmap, unsigned int index,
				 struct exmap_segments *segments)
{
	unsigned int i;

	for (i = 0; i < segments->count; i++) {
		exmap_alloc(exmap, index, &segments->ranges[i], &segments->results[i], 1);
		if (segments->results[i].pages != segments->ranges[i].count)
			segments->count = i + 1;
	}
	return exmap_bytes_done(segments, true);
}

static ssize_t exmap_proxy_transfer(struct exmap *exmap, unsigned int index, u64 opcode,
				    struct exmap_segments *segments)
{
	struct exmap_transfer_batch *batch = exmap_transfer_get_batch(&exmap->interface[index]);
	int error;

	if (!batch)
		return -ENOMEM;
	exmap_proxy_plan(batch, exmap, index, opcode, segments);
	error = exmap_transfer_finish(batch);
	return error ? error : exmap_bytes_done(segments, batch->has_gap);
}

/* Whether the call asks for one page. */
static bool exmap_is_one_page(const struct iov_iter *iter)
{
	return iov_iter_count(iter) == PAGE_SIZE && vellum_iter_length(iter) == PAGE_SIZE;
}

/* Brings one page, without a vector. EAGAIN: that is not enough. */
static ssize_t exmap_proxy_one(struct exmap *exmap, unsigned int index, u64 opcode,
			       const struct kiocb *kiocb, const struct iov_iter *iter)
{
	struct exmap_result result;
	struct exmap_range range;
	int error;

	error = exmap_find_range(exmap, (unsigned long)vellum_iter_address(iter), PAGE_SIZE,
				 &range);
	if (unlikely(error))
		return error;
	if (opcode == EXMAP_PUBLISHED_OP_READ)
		return exmap_transfer_read_page(exmap, index, kiocb, range.page);
	result = exmap_alloc_page(exmap, index, range.page);
	return result.pages ? PAGE_SIZE : result.error;
}

/* Carries out as many segments at a time as the interface has room for. */
static noinline ssize_t exmap_proxy_all(struct exmap *exmap, unsigned int index, u64 opcode,
					struct iov_iter *iter)
{
	struct exmap_interface *interface = &exmap->interface[index];
	struct exmap_segments segments = { .ranges = interface->ranges,
					  .results = interface->results };
	ssize_t bytes = 0, outcome;
	size_t before, asked;

	do {
		before = iov_iter_count(iter);
		outcome = exmap_read_segments(exmap, iter, &segments, VELLUM_EXMAP_VECTOR_ENTRIES);
		asked = before - iov_iter_count(iter);
		if (segments.count)
			outcome = opcode == EXMAP_PUBLISHED_OP_ALLOC ?
				  exmap_proxy_alloc(exmap, index, &segments) :
				  exmap_proxy_transfer(exmap, index, opcode, &segments);
		if (outcome < 0)
			return bytes ?: outcome;
		bytes += outcome;
	} while (outcome == asked && iov_iter_count(iter));
	return bytes;
}

static ssize_t exmap_proxy_carry_out(struct exmap *exmap, unsigned int index, u64 opcode,
				     const struct kiocb *kiocb, struct iov_iter *iter)
{
	bool brings = opcode == EXMAP_PUBLISHED_OP_READ || opcode == EXMAP_PUBLISHED_OP_ALLOC;
	ssize_t outcome = -EAGAIN;

	if (likely(brings && exmap_is_one_page(iter)))
		outcome = exmap_proxy_one(exmap, index, opcode, kiocb, iter);
	return outcome == -EAGAIN ? exmap_proxy_all(exmap, index, opcode, iter) : outcome;
}

/* Whether there is such a call, for this exmap. */
static int exmap_proxy_check(struct exmap *exmap, u64 opcode, bool write)
{
	switch (opcode) {
	case EXMAP_PUBLISHED_OP_ALLOC:
		return write ? -EINVAL : 0;
	case VELLUM_EXMAP_OP_REFRESH:
		if (write)
			return -EINVAL;
		break;
	case EXMAP_PUBLISHED_OP_WRITE:
		if (!write)
			return -EINVAL;
		break;
	case EXMAP_PUBLISHED_OP_READ:
		break;
	default:
		return -EINVAL;
	}
	return exmap_transfer_is_possible(exmap, write) ? 0 : -EBADF;
}

static bool exmap_is_direct(const struct exmap *exmap)
{
	return exmap->backing && (exmap->backing->f_flags & O_DIRECT);
}

static ssize_t exmap_proxy(struct kiocb *kiocb, struct iov_iter *iter, bool write)
{
	struct exmap *exmap = exmap_of(kiocb->ki_filp);
	unsigned int index = kiocb->ki_pos & 0xff;
	u64 opcode = kiocb->ki_pos >> 8;
	struct exmap_interface *interface = exmap_find_interface(exmap, index);
	bool nowait = kiocb->ki_flags & IOCB_NOWAIT;
	bool is_alloc = opcode == EXMAP_PUBLISHED_OP_ALLOC;
	bool is_later = !write && !is_alloc && !is_sync_kiocb(kiocb) && exmap_is_direct(exmap);
	ssize_t outcome;

	if (IS_ERR(interface))
		return PTR_ERR(interface);
	if (!user_backed_iter(iter))
		return -EINVAL;
	outcome = exmap_proxy_check(exmap, opcode, write);
	if (outcome)
		return outcome;
	/* The call would wait for something other than memory or the interface. */
	if (nowait && !is_alloc && !is_later)
		return -EAGAIN;
	if (write)
		opcode = EXMAP_PUBLISHED_OP_WRITE;
	outcome = exmap_lock_interface(exmap, interface, !nowait);
	if (outcome)
		return outcome;
	if (is_later)
		outcome = exmap_async_read(exmap, index, opcode, kiocb, iter);
	else
		outcome = exmap_proxy_carry_out(exmap, index, opcode, kiocb, iter);
	mutex_unlock(&interface->lock);
	return outcome;
}

ssize_t exmap_read_iter(struct kiocb *kiocb, struct iov_iter *iter)
{
	return exmap_proxy(kiocb, iter, false);
}

ssize_t exmap_write_iter(struct kiocb *kiocb, struct iov_iter *iter)
{
	return exmap_proxy(kiocb, iter, true);
}
