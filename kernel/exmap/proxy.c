// SPDX-License-Identifier: GPL-2.0
/*
 * The descriptor as a proxy of the backing file (SIGMOD 2023, 4.3): pread and preadv bring pages
 * that are not there to the surface and read them, pwrite and pwritev write pages. The buffers are
 * parts of the surface, whose place says which part of the file is meant; so the offset is free to
 * name the interface, and a vector is scattered in the file as it is on the surface.
 *
 *	offset = interface | opcode << 8
 *
 * With the opcode ALLOC, pread and preadv bring pages and read nothing.
 */

#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/uio.h>
#include <vellum/exmap_published.h>

#include "core/compat.h"
#include "exmap/exmap.h"
#include "exmap/transfer.h"

/* Segments of one call. */
struct segments {
	unsigned int		count;
	struct page_range	*ranges;
	struct exmap_result	*results;
};

/* The next segment as pages of the surface; it must be some whole ones. */
static int segment_pages(struct exmap *exmap, struct iov_iter *iter, struct page_range *range)
{
	unsigned long address = (unsigned long)segment_address(iter);
	size_t length = segment_length(iter);
	unsigned long start = exmap->mount.start;

	if (address < start || !PAGE_ALIGNED(address) || !PAGE_ALIGNED(length) ||
	    length >> PAGE_SHIFT > UINT_MAX)
		return -EINVAL;
	range->page = (address - start) >> PAGE_SHIFT;
	range->count = length >> PAGE_SHIFT;
	iov_iter_advance(iter, length);
	return exmap_contains(exmap, *range) ? 0 : -EINVAL;
}

static int read_segments(struct exmap *exmap, struct iov_iter *iter, struct segments *segments)
{
	unsigned long most = iter_is_iovec(iter) ? iter->nr_segs : 1;
	int error = 0;

	segments->count = 0;
	segments->ranges = kvmalloc_array(most, sizeof(*segments->ranges), GFP_KERNEL_ACCOUNT);
	segments->results = kvcalloc(most, sizeof(*segments->results), GFP_KERNEL_ACCOUNT);
	if (!segments->ranges || !segments->results)
		return -ENOMEM;
	while (!error && iov_iter_count(iter)) {
		/* Empty ones are skipped when the iterator moves. */
		if (WARN_ON_ONCE(segments->count == most))
			return -EINVAL;
		error = segment_pages(exmap, iter, &segments->ranges[segments->count++]);
	}
	return error;
}

/* Bytes of the segments before the first that failed; if it is the first, its error. */
static ssize_t bytes_done(const struct segments *segments)
{
	ssize_t bytes = 0;
	unsigned int i;

	for (i = 0; i < segments->count; i++) {
		if (segments->results[i].error)
			return bytes ?: segments->results[i].error;
		bytes += (ssize_t)segments->ranges[i].count << PAGE_SHIFT;
	}
	return bytes;
}

static ssize_t transfer(struct exmap *exmap, unsigned int index, struct segments *segments,
			bool write)
{
	struct transfer_batch batch;
	unsigned int i;

	if (!exmap->backing || !(exmap->backing->f_mode & (write ? FMODE_WRITE : FMODE_READ)))
		return -EBADF;
	transfer_begin(&batch, exmap, index);
	for (i = 0; i < segments->count; i++) {
		if (write)
			transfer_write(&batch, segments->ranges[i], &segments->results[i]);
		else
			transfer_fill(&batch, segments->ranges[i], true, &segments->results[i]);
	}
	transfer_finish(&batch);
	return bytes_done(segments);
}

static ssize_t proxy(struct kiocb *kiocb, struct iov_iter *iter, bool write)
{
	struct exmap *exmap = exmap_of(kiocb->ki_filp);
	unsigned int index = kiocb->ki_pos & 0xff;
	unsigned int opcode = kiocb->ki_pos >> 8;
	struct segments segments = {};
	ssize_t outcome = exmap_may_command(exmap);

	if (outcome)
		return outcome;
	if (index >= exmap->interfaces || !user_backed_iter(iter))
		return -EINVAL;
	if (kiocb->ki_flags & IOCB_NOWAIT)
		return -EAGAIN;
	outcome = read_segments(exmap, iter, &segments);
	if (!outcome && mutex_lock_killable(&exmap->interface[index].lock))
		outcome = -EINTR;
	if (outcome)
		goto out;
	if (opcode == EXMAP_PUBLISHED_OP_ALLOC && !write) {
		exmap_alloc(exmap, index, segments.ranges, segments.results, segments.count);
		outcome = bytes_done(&segments);
	} else if (opcode == EXMAP_PUBLISHED_OP_READ ||
		   (write && opcode == EXMAP_PUBLISHED_OP_WRITE)) {
		outcome = transfer(exmap, index, &segments, write);
	} else {
		outcome = -EINVAL;
	}
	mutex_unlock(&exmap->interface[index].lock);
out:
	kvfree(segments.ranges);
	kvfree(segments.results);
	return outcome;
}

ssize_t exmap_read_iter(struct kiocb *kiocb, struct iov_iter *iter)
{
	return proxy(kiocb, iter, false);
}

ssize_t exmap_write_iter(struct kiocb *kiocb, struct iov_iter *iter)
{
	return proxy(kiocb, iter, true);
}
