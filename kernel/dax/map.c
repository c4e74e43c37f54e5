// SPDX-License-Identifier: GPL-2.0
/*
 * Mapping a file by its table. Where the table has no leaf, the file system serves the mapping: it
 * gets the faults, and puts entries into the process' own page tables, as for any mapping.
 */

#include <linux/mm.h>
#include <linux/pkeys.h>
#include <linux/slab.h>

#include "core/pt_pieces.h"
#include "core/pt_slot.h"
#include "dax/dax.h"

/* A mapping of a process. It ends with its VMA. */
struct dax_mount {
	struct pt_mount		mount;
	struct dax_table	*table;
	struct file		*file;		/* by which the table was opened */
	bool			is_durable;	/* as that descriptor asked for */
	/* The file system's operations on a mapping. */
	const struct vm_operations_struct *operations;
};

static struct dax_mount *dax_mount_of(const struct vm_area_struct *vma)
{
	struct pt_mount *mount = vma->vm_private_data;

	return mount ? container_of(mount, struct dax_mount, mount) : NULL;
}

/*
 * Makes a copy of the VMA one of the file system's. Where blocks are to be durable before they are
 * shown, the file system sees to that, too.
 */
static void dax_borrow_vma(struct vm_area_struct *vma, const struct dax_mount *mount)
{
	vma->vm_file = mount->file;
	vma->vm_ops = NULL;
	vma->vm_private_data = NULL;
	if (mount->is_durable)
		pt_vma_init_flags(vma, vma->vm_flags | VM_SYNC);
}

/*
 * Has the file system handle the fault, as one in a mapping of its own: with a copy of the VMA that
 * has its file and its operations. The file system walks the page tables anew. So it does no harm
 * if the core found the table's entries there just before another thread barred the mount.
 */
static vm_fault_t dax_fault_in_file(struct vm_fault *vmf, const struct dax_mount *mount,
				    vm_fault_t (*handle)(struct vm_fault *vmf))
{
	struct vm_area_struct vma = *vmf->vma;
	struct vm_fault own = {
		.vma = &vma,
		.gfp_mask = vmf->gfp_mask,
		.pgoff = vmf->pgoff,
		.address = vmf->address,
		.real_address = vmf->real_address,
		.flags = vmf->flags,
		.pmd = vmf->pmd,
		.pud = vmf->pud,
		.orig_pte = vmf->orig_pte,
		.pte = vmf->pte,
		.ptl = vmf->ptl,
		.prealloc_pte = vmf->prealloc_pte,
	};
	vm_fault_t outcome;

	dax_borrow_vma(&vma, mount);
	vma.vm_ops = mount->operations;
	outcome = handle(&own);
	vmf->page = own.page;
	vmf->prealloc_pte = own.prealloc_pte;
	return outcome;
}

/* Whether the table has served the fault. */
static bool dax_fault_in_table(struct vm_fault *vmf, struct dax_mount *mount, vm_fault_t *outcome)
{
	struct dax_table *table = mount->table;
	bool is_served = false;

	if (READ_ONCE(mount->mount.barred))
		return false;
	filemap_invalidate_lock_shared(table->mapping);
	if (dax_table_shows(table, vmf->pgoff)) {
		*outcome = pt_mount_refault(&mount->mount, vmf);
		/* While the file system serves another fault, the mount stays detached. */
		is_served = *outcome != VM_FAULT_NOPAGE || READ_ONCE(mount->mount.attached);
	}
	filemap_invalidate_unlock_shared(table->mapping);
	return is_served;
}

static vm_fault_t dax_serve_fault(struct vm_fault *vmf, struct dax_mount *mount,
				  vm_fault_t (*handle)(struct vm_fault *vmf))
{
	vm_fault_t outcome;

	if (dax_fault_in_table(vmf, mount, &outcome))
		return outcome;
	dax_table_misses(mount->table, vmf->pgoff);
	dax_table_refresh_later(mount->table, mount->file);
	if (!pt_mount_bar(&mount->mount))
		return VM_FAULT_NOPAGE;
	outcome = dax_fault_in_file(vmf, mount, handle);
	pt_mount_served(&mount->mount);
	return outcome;
}

static vm_fault_t dax_vm_fault(struct vm_fault *vmf)
{
	struct dax_mount *mount = dax_mount_of(vmf->vma);

	/* A copy has no mount. Or no access is allowed, and the core still tries. */
	if (!mount || !vma_is_accessible(vmf->vma))
		return VM_FAULT_SIGSEGV;
	return dax_serve_fault(vmf, mount, mount->operations->fault);
}

/* A write to a page that the file system has mapped for reading. */
static vm_fault_t dax_vm_pfn_mkwrite(struct vm_fault *vmf)
{
	struct dax_mount *mount = dax_mount_of(vmf->vma);

	if (!mount || !mount->operations->pfn_mkwrite)
		return VM_FAULT_SIGBUS;
	return dax_serve_fault(vmf, mount, mount->operations->pfn_mkwrite);
}

static void dax_mount_end(struct dax_mount *mount)
{
	struct dax_table *table = mount->table;

	pt_mounts_remove(&table->mounts, &mount->mount);
	dax_table_put(table, mount->file);
	fput(mount->file);
	kfree(mount);
}

static void dax_vm_close(struct vm_area_struct *vma)
{
	struct dax_mount *mount = dax_mount_of(vma);

	if (!mount)
		return;
	pt_mount_vm_close(vma);
	dax_mount_end(mount);
}

/*
 * Whether a mapping of this length may have these rights: without the right to write no entry is of
 * level 1 (pt_mount.h).
 */
static bool dax_length_fits(unsigned long len, unsigned long flags)
{
	bool reads = (flags & (VM_READ | VM_WRITE)) == VM_READ;

	return IS_ALIGNED(len, reads ? VELLUM_DAX_READ_UNIT : VELLUM_DAX_UNIT) &&
	       len <= VELLUM_DAX_MAX_EXTENT;
}

/* The next access attaches the mount again, with the new rights. */
static int dax_vm_mprotect(struct vm_area_struct *vma, unsigned long start, unsigned long end,
			   unsigned long flags)
{
	struct dax_mount *mount = dax_mount_of(vma);

	if (start != vma->vm_start || end != vma->vm_end || !mount)
		return -EINVAL;
	/* The key would have to be in the leaves, which other processes share. */
	if (flags & ARCH_VM_PKEY_FLAGS)
		return -EOPNOTSUPP;
	if (!dax_length_fits(end - start, flags))
		return -EINVAL;
	pt_mount_detach(&mount->mount);
	return 0;
}

static const struct vm_operations_struct dax_vm_ops = {
	.open = pt_mount_vm_open,
	.close = dax_vm_close,
	.may_split = pt_mount_vm_may_split,
	.mremap = pt_mount_vm_mremap,
	.mprotect = dax_vm_mprotect,
	.fault = dax_vm_fault,
	.pfn_mkwrite = dax_vm_pfn_mkwrite,
};

/*
 * Asks the file system to map its file, with a copy of the VMA, for the operations on a mapping and
 * for a refusal.
 */
static int dax_ask_file(struct dax_mount *mount, const struct vm_area_struct *vma)
{
	struct vm_area_struct own = *vma;
	int error;

	dax_borrow_vma(&own, mount);
	error = mount->file->f_op->mmap(mount->file, &own);
	if (error)
		return error;
	mount->operations = own.vm_ops;
	return own.vm_ops && own.vm_ops->fault ? 0 : -EOPNOTSUPP;
}

static struct dax_mount *dax_mount_make(const struct dax_handle *handle, struct mm_struct *process)
{
	struct dax_mount *mount = kzalloc(sizeof(*mount), GFP_KERNEL_ACCOUNT);

	if (!mount)
		return NULL;
	pt_mount_init(&mount->mount, &handle->table->tree);
	dax_table_get(handle->table);
	mount->table = handle->table;
	mount->file = get_file(handle->file);
	mount->is_durable = handle->flags & VELLUM_DAX_DURABLE;
	pt_mounts_add(&mount->table->mounts, &mount->mount, process);
	return mount;
}

/* Whether one entry mounts all that the longest mapping covers. */
static bool dax_is_one_piece(const struct vm_area_struct *vma)
{
	return vma->vm_end - vma->vm_start == VELLUM_DAX_MAX_EXTENT &&
	       IS_ALIGNED(vma->vm_start, VELLUM_DAX_MAX_EXTENT) &&
	       pt_slot_highest() >= DAX_MAX_ORDER;
}

/* Makes the tables of level 2 that the mapping covers. */
static int dax_mount_create(struct dax_mount *mount, struct vm_area_struct *vma)
{
	struct dax_table *table = mount->table;
	u64 pages = vma_pages(vma);
	int error;

	down_write(&table->shape);
	error = dax_table_grow(table, pt_order_for(pages));
	/* The root alone is mounted with its guards, which tables replace. */
	if (!error && !dax_is_one_piece(vma))
		error = dax_table_make_room(table, pages);
	if (!error)
		error = pt_mount_create_detached(&mount->mount, vma);
	up_write(&table->shape);
	return error;
}

int dax_map(struct file *file, struct vm_area_struct *vma)
{
	struct dax_handle *handle = file->private_data;
	struct dax_mount *mount;
	int error;

	if (!(vma->vm_flags & VM_MAYSHARE) || vma->vm_pgoff ||
	    !dax_length_fits(vma->vm_end - vma->vm_start, vma->vm_flags))
		return -EINVAL;
	if ((vma->vm_flags & VM_EXEC) ||
	    ((vma->vm_flags & VM_MAYWRITE) && IS_APPEND(dax_inode(handle->table))))
		return -EACCES;
	if ((vma->vm_flags & VM_SYNC) && !(handle->flags & VELLUM_DAX_DURABLE))
		return -EOPNOTSUPP;
	mount = dax_mount_make(handle, vma->vm_mm);
	if (!mount)
		return -ENOMEM;
	error = dax_ask_file(mount, vma);
	/* Without VM_PFNMAP and VM_IO no virtual machine takes references to pages. */
	pt_vma_change_flags(vma, VM_MIXEDMAP | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY |
				 VM_NOHUGEPAGE, VM_MAYEXEC);
	if (!error)
		error = dax_mount_create(mount, vma);
	if (error) {
		dax_mount_end(mount);
		return error;
	}
	if (vma->vm_flags & VM_MAYWRITE)
		WRITE_ONCE(mount->table->is_written, true);
	vma->vm_ops = &dax_vm_ops;
	return 0;
}

unsigned long dax_area(struct file *file, unsigned long addr, unsigned long len,
		       unsigned long pgoff, unsigned long flags)
{
	if (!len || !IS_ALIGNED(len, VELLUM_DAX_UNIT) || len > VELLUM_DAX_MAX_EXTENT)
		return -EINVAL;
	return pt_pieces_area(file, addr, len, pgoff, flags);
}
