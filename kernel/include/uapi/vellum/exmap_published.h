/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The interface of the exmap module that came with the papers (SIGMOD 2023 and IEEE Access 2023).
 * /dev/exmap speaks it as well, so programs written for that module run unchanged. Its numbers and
 * layouts are the papers'. New programs use exmap.h.
 *
 * Such a surface is pinnable (VELLUM_EXMAP_PINNABLE), and it may be mapped before SETUP.
 *
 * pread and preadv with READ or ALLOC tell a thread whether it has brought a page. They return the
 * bytes of the parts that came as a whole, up to the first part of which a page was there before.
 * That page is left as it is. So 0 means that another thread has brought the page, and of several
 * threads only one is told that it has. A call that an error stops returns what came before, and
 * the error if nothing came: EINVAL not pages of the surface; EFAULT a part ends outside; ENOMEM
 * the pool is empty; ENODATA the file ends before; otherwise the error of the device.
 * VELLUM_EXMAP_OP_REFRESH reads pages again that are there.
 *
 * In the entries of ACTION and of a registered buffer, a range without pages is no error, and a
 * range that is not within the surface is EFAULT. An io_uring command with a range returns bytes.
 *
 * Differences from the published module:
 *
 * - A part of which some pages are there gets the others with their data. The published module
 *   shows them without it. The call ends there as well.
 * - Pages come when their data is there. If another thread brings a page of a part meanwhile, the
 *   call returns what came before that part. Later parts may have come as well.
 * - An empty pool is an error (ENOMEM), also as the result of ACTION, and not 0.
 * - FREE exists as an io_uring command, and WRITE by pwrite and pwritev. The file may be a regular
 *   one.
 * - The mapping of page tables shows an unprivileged program entries of 1 (the page is there) and
 *   0.
 */
#ifndef _UAPI_VELLUM_EXMAP_PUBLISHED_H
#define _UAPI_VELLUM_EXMAP_PUBLISHED_H

#include <linux/ioctl.h>
#include <linux/types.h>

struct exmap_published_setup {
	__s32 fd;		/* -1: none */
	__s32 max_interfaces;
	__u64 buffer_size;	/* frames */
	__u64 flags;
};

struct exmap_published_action {
	__u16 interface;
	__u16 iov_len;
	__u16 opcode;
	__u16 padding;
	__u64 flags;
};

struct exmap_published_stats {
	__u64 flags;
	__u64 buffer_size;
	__u64 alloc_count;
	__u32 max_interfaces;
	__u32 padding;
};

/* Opcodes of ACTION, and of the offset of pread and preadv: interface | opcode << 8. */
#define EXMAP_PUBLISHED_OP_READ		0
#define EXMAP_PUBLISHED_OP_ALLOC	1
#define EXMAP_PUBLISHED_OP_FREE		2
#define EXMAP_PUBLISHED_OP_WRITE	3

#define EXMAP_PUBLISHED_SETUP	_IOC(_IOC_WRITE, 'k', 1, sizeof(struct exmap_published_setup))
#define EXMAP_PUBLISHED_ACTION	_IOC(_IOC_WRITE, 'k', 2, sizeof(struct exmap_published_action))
/* The argument is a descriptor. This descriptor becomes a private descriptor of it. */
#define EXMAP_PUBLISHED_CLONE	_IOC(_IOC_WRITE, 'k', 3, sizeof(int))
#define EXMAP_PUBLISHED_STATS	_IOC(_IOC_WRITE, 'k', 4, sizeof(struct exmap_published_stats))

#endif /* _UAPI_VELLUM_EXMAP_PUBLISHED_H */
